"""Chooses tokens from logits, on the device, without the state of a generator and without waiting for the device.

The filters are applied in the order temperature, top-k, top-p, min-p, as in Transformers. Noise is a pure function of
(seed, sample, position, token), so a token depends neither on the rest of the batch nor on how often the step runs.
Shape legend: S samples, R samples that draw, E samples with changed logits, G some of the R, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.sampling.inputs import FEW_RANKS, SamplingInputs

# Numbers of ranks that a CPU tries before it sorts the whole vocabulary: for 32 rows of 152,000 tokens this takes 7 or
# 50 ms instead of 460.
_CPU_RANKS = (256, 4096)
# Up to this size of the vocabulary, the whole row is sorted.
_SMALL_VOCABULARY = 1023
# Elements of a scratch tensor; rows beyond that are processed in parts.
_MAX_SCRATCH = 1 << 24
# On a CPU, noise is computed only for the tokens that the filters leave if these are fewer than one in _SPARSE.
_SPARSE = 8


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedLogits:
    """The changed logits of some samples, which replace the model's."""

    # int64 [E]: indices into the S samples.
    samples: Tensor
    # int64 [n] twice: indices into the E samples and into the R samples, of samples in both. None if there are none.
    draws: tuple[Tensor, Tensor] | None
    # float32 [E, V].
    logits: Tensor


def _mix(z: Tensor) -> Tensor:
    """Computes splitmix64's finaliser on int64. The masks make the shifts logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FACTOR_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _FACTOR_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def noise_keys(seed: Tensor, sample_idx: Tensor, position: Tensor) -> Tensor:
    """Returns one key per row, int64 [R]; the arguments have the same shape."""
    return _mix(_mix(_mix(seed + _GOLDEN) ^ sample_idx) + position * _GOLDEN)


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Returns standard Gumbel noise, float32, for int64 `keys` and `tokens`, which are broadcast with each other."""
    bits = _mix(keys + (tokens + 1) * _GOLDEN)
    # Uniform in (0, 1), fine near 0, where the exponential -log(1 - u) decides the winner.
    uniform = ((bits >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def filtered(logits: Tensor, inputs: SamplingInputs[Tensor]) -> Tensor:
    """Returns tempered logits, float32 [R, V], -inf for removed tokens. Equal logits are kept or removed together."""
    logits = logits / inputs.temperature[:, None]
    if inputs.rank_groups:
        threshold = logits.new_full((logits.shape[0],), -torch.inf)
        for group in inputs.rank_groups:
            if group.places is None:
                threshold = _rank_threshold(logits, inputs.top_k, inputs.top_p, few=group.few)
            else:
                top_k, top_p = inputs.top_k[group.places], inputs.top_p[group.places]
                own = _rank_threshold(logits.index_select(0, group.places), top_k, top_p, few=group.few)
                threshold.index_copy_(0, group.places, own)
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    if inputs.filters_min_p:
        # log 0 is -inf: a row without min_p keeps all tokens.
        floor = logits.amax(-1, keepdim=True) + inputs.min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if inputs.typical is not None:
        places, typical_p = inputs.typical
        step = max(1, _MAX_SCRATCH // logits.shape[1])
        for first in range(0, places.numel(), step):
            part = slice(first, first + step)
            own = logits.index_select(0, places[part])
            # In place: the division above made a copy.
            logits.index_copy_(0, places[part], _typical(own, typical_p[part]))
    return logits


def _typical(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): float32 [G, V], -inf for the tokens that are removed.

    Keeps the tokens whose information, -log p, is closest to the row's entropy, until they hold typical_p [G]. Tokens
    at an equal distance stand or fall together.
    """
    logprobs = logits.log_softmax(-1)
    share = logprobs.exp()
    # What an earlier filter removed is 0 x -inf here, and infinitely far away below.
    entropy = -(share * logprobs).nansum(-1, keepdim=True)
    distance = (logprobs + entropy).abs()
    ordered, order = distance.sort(-1)
    # The sums' rounding may not decide: float64.
    up_to = share.gather(-1, order).double().cumsum(-1)
    last = (up_to < typical_p[:, None]).sum(-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > ordered.gather(-1, last), -torch.inf)


def _rank_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, *, few: bool) -> Tensor:
    """Returns the smallest logit that top-k and then top-p keep, [G].

    The result does not depend on the number of ranks evaluated: sums begin with the most probable token and are
    compared with the sum of the whole row, or of its top_k.
    """
    num_rows, vocab_size = logits.shape
    if few or logits.device.type != "cpu" or vocab_size <= _SMALL_VOCABULARY:
        num_ranks = FEW_RANKS if few else vocab_size
        step = max(1, _MAX_SCRATCH // min(num_ranks, vocab_size))
        parts = [slice(first, first + step) for first in range(0, num_rows, step)]
        found = [_threshold_within(logits[at], top_k[at], top_p[at], None, num_ranks)[0] for at in parts]
        return found[0] if len(found) == 1 else torch.cat(found)
    # The most probable token's share of the row.
    peak = logits.softmax(-1).amax(-1)
    threshold = torch.empty_like(peak)
    left = torch.arange(num_rows)
    for num_ranks in (*(size for size in _CPU_RANKS if size <= vocab_size // 4), vocab_size):
        whole = left.numel() == num_rows
        rows = logits if whole else logits.index_select(0, left)
        found, settled = _threshold_within(rows, top_k[left], top_p[left], peak[left], num_ranks)
        threshold[left] = found
        left = left[~settled]
        if not left.numel():
            break
    return threshold


def _threshold_within(
    logits: Tensor, top_k: Tensor, top_p: Tensor, peak: Tensor | None, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Returns thresholds [G] from the `num_ranks` largest logits of each row, and whether these suffice, bool [G].

    `peak` [G] is the probability of the largest logit. It is None if the ranks include every token that a row may keep.
    """
    vocab_size = logits.shape[1]
    if num_ranks < vocab_size:
        ranked = logits.topk(num_ranks).values
    else:
        num_ranks = vocab_size
        ranked = logits.sort(-1, descending=True).values
    # Probabilities relative to the largest one. Sums are float64, so that their rounding does not decide.
    share = (ranked - ranked[:, :1]).exp().double()
    up_to = share.cumsum(-1)
    limited = (top_k > 0) & (top_k < vocab_size)
    last = torch.where(limited, top_k, num_ranks).clamp(max=num_ranks)[:, None] - 1
    total = up_to.gather(1, last)
    if peak is not None:
        total = torch.where(limited[:, None], total, 1 / peak.double()[:, None])
    # A token is kept while the tokens before it hold less than top_p; the first is always kept.
    kept = (up_to - share < top_p[:, None] * total) | (top_p >= 1)[:, None]
    kept &= torch.arange(num_ranks, device=logits.device) <= last
    kept[:, 0] = True
    num_kept = kept.sum(-1, keepdim=True)
    settled = torch.where(limited, top_k <= num_ranks, num_kept[:, 0] < num_ranks) | (num_ranks == vocab_size)
    return ranked.gather(1, num_kept - 1)[:, 0], settled


def _add_noise(logits: Tensor, keys: Tensor) -> None:
    """Adds each row's noise to logits [R, V] in place; tokens that a filter removed stay at -inf."""
    num_rows, vocab_size = logits.shape
    if logits.device.type == "cpu" and vocab_size > _SMALL_VOCABULARY:
        kept = logits > -torch.inf
        if _SPARSE * int(kept.sum()) < logits.numel():
            rows, tokens = kept.nonzero(as_tuple=True)
            logits.index_put_((rows, tokens), logits[kept] + gumbel_noise(keys[rows], tokens))
            return
    tokens = torch.arange(vocab_size, device=logits.device)
    step = max(1, _MAX_SCRATCH // vocab_size)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        logits[part] += gumbel_noise(keys[part, None], tokens)


def sample(logits: Tensor, inputs: SamplingInputs[Tensor] | None, edited: EditedLogits | None = None) -> Tensor:
    """Returns tokens int64 [S] for logits [S, V], -1 if a row's logits are not all finite or its edits ban every token.

    `inputs` is None if every sample is greedy.
    """
    # A sum is finite if every term is (logits are far from overflow); this takes one fast pass.
    usable = logits.sum(-1, dtype=torch.float32).isfinite()
    tokens = logits.argmax(-1)
    if edited is not None:
        best = edited.logits.argmax(-1)
        tokens.index_copy_(0, edited.samples, best)
        possible = edited.logits.gather(1, best[:, None])[:, 0] > -torch.inf
        usable.index_copy_(0, edited.samples, possible & usable.index_select(0, edited.samples))
    if inputs is not None:
        drawing = logits.index_select(0, inputs.rows).float()
        if edited is not None and edited.draws is not None:
            sources, places = edited.draws
            drawing.index_copy_(0, places, edited.logits.index_select(0, sources))
        drawing = filtered(drawing, inputs)
        _add_noise(drawing, noise_keys(inputs.seed, inputs.sample_idx, inputs.position))
        tokens.index_copy_(0, inputs.rows, drawing.argmax(-1))
    return tokens.masked_fill_(~usable, -1)
