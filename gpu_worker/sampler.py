"""Next tokens from logits, on the device, without a generator's state and without waiting for the device.

Owns the order of the filters (temperature, top-k, top-p, min-p, as Transformers') and the noise. Knows nothing of rows
or plans. Noise is a pure function of (seed, sample, position, token), so a token does not depend on what else is in
the batch, nor on how often the step was run. Shape legend: S sampled rows, R those of them that draw, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Where every filtered row keeps at most this many tokens, a top-k of it replaces the sort.
_MAX_PARTIAL_SORT = 128


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """What the drawing rows of a step ask for; all tensors are on the device."""

    # int64 [R]: which of the S rows draw; the others are greedy.
    rows: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    # int64 [R]: the noise's key. Seeds are unsigned 64-bit numbers, reinterpreted.
    seed: Tensor
    sample_idx: Tensor
    # Position of the token to be drawn.
    position: Tensor
    # The largest top_k where every row that filters by rank has one; None: some row has top_p alone.
    largest_top_k: int | None
    # Whether any row filters by rank, and by min_p.
    filters_rank: bool
    filters_min_p: bool


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64; shifts are made logical by masks."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FACTOR_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _FACTOR_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def gumbel_noise(seed: Tensor, sample_idx: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """float32 [R, V] of standard Gumbel noise keyed by (seed, sample, position, token); int64 [R] each."""
    key = _mix(_mix(_mix(seed + _GOLDEN) ^ sample_idx) + position * _GOLDEN)
    tokens = torch.arange(1, vocab_size + 1, device=seed.device)
    bits = _mix(key[:, None] + tokens * _GOLDEN)
    # Uniform in (0, 1), fine near 0, where the exponential -log(1 - u) decides the winner.
    uniform = ((bits >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def filtered(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """float32 [R, V]: tempered logits, -inf where a filter removes the token. Equal logits stand or fall together."""
    logits = logits / inputs.temperature[:, None]
    if inputs.filters_rank:
        logits = logits.masked_fill(logits < _rank_threshold(logits, inputs), -torch.inf)
    if inputs.filters_min_p:
        # log 0 is -inf: a row without min_p keeps all.
        floor = logits.amax(-1, keepdim=True) + inputs.min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _rank_threshold(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """The smallest logit that top-k and then top-p keep, [R, 1]; -inf where a row has neither."""
    vocab_size = logits.shape[-1]
    num_ranks = vocab_size
    if inputs.largest_top_k is not None and inputs.largest_top_k <= _MAX_PARTIAL_SORT:
        num_ranks = min(vocab_size, _MAX_PARTIAL_SORT)
    ranked = logits.topk(num_ranks).values if num_ranks < vocab_size else logits.sort(-1, descending=True).values
    unlimited = (inputs.top_k == 0) & (inputs.top_p >= 1)
    top_k = torch.where(inputs.top_k == 0, vocab_size, inputs.top_k)
    ranks = torch.arange(num_ranks, device=logits.device)
    kept = ranks < top_k[:, None]
    mass = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
    # Kept while the tokens before it do not yet hold top_p; the first always is.
    kept &= (mass.cumsum(-1) - mass < inputs.top_p[:, None]) | (inputs.top_p >= 1)[:, None]
    kept[:, 0] = True
    threshold = ranked.gather(-1, kept.sum(-1, keepdim=True) - 1)
    return torch.where(unlimited[:, None], -torch.inf, threshold)


def sample(logits: Tensor, inputs: SamplingInputs | None, banned: tuple[Tensor, Tensor] | None) -> Tensor:
    """Tokens int64 [S] for logits [S, V]; -1 where a row's logits are not all finite.

    banned: int64 [n] pairs of row and token that may not come out. `inputs` None: every row is greedy.
    """
    # A sum is finite where every term is (logits are far from overflow), in one fast pass.
    finite = logits.sum(-1, dtype=torch.float32).isfinite()
    if banned is not None:
        logits = logits.index_put(banned, logits.new_full((), -torch.inf))
    tokens = logits.argmax(-1)
    if inputs is not None:
        drawing = filtered(logits[inputs.rows].float(), inputs)
        noise = gumbel_noise(inputs.seed, inputs.sample_idx, inputs.position, logits.shape[-1])
        tokens[inputs.rows] = drawing.add_(noise).argmax(-1)
    return tokens.masked_fill_(~finite, -1)
