"""What both paths of a choice have in common: the largest logit, noise, and which tokens the filters keep.

The largest logit of each row, and whether the row is finite, are found on a CPU by one pass of a native kernel. Torch
needs two passes, of which the one for the index takes five times as long as reading the row.

Gumbel noise is a pure function of (seed, sample, position, token): no generator has a state. Hashing is splitmix64
(Steele, Lea, Flood 2014) on int64, where overflow wraps around.

Top-k and top-p filter by rank, typical-p by information, with torch operators. Shape legend: G rows, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from gpu_worker.native.library import NativeFunction, native_library
from gpu_worker.sampling.inputs import FEW_RANKS

_TYPES = (torch.float32, torch.bfloat16)
# Tokens are 32-bit numbers in the kernel.
_MOST_TOKENS = (1 << 31) - 1
# Elements of a scratch tensor; rows beyond that are processed in parts.
MAX_SCRATCH = 1 << 24
# Numbers of ranks that a CPU tries before it sorts the whole vocabulary: for 32 rows of 152,000 tokens this takes 7 or
# 50 ms instead of 460.
_CPU_RANKS = (256, 4096)
# Up to this size of the vocabulary, the whole row is sorted.
SMALL_VOCABULARY = 1023


@cache
def _kernel() -> NativeFunction | None:
    library = native_library()
    if library is None:
        return None
    return library.function("tandem_greedy", c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32)


def greedy_tokens(logits: Tensor) -> Tensor:
    """Returns int64 [S]: the first of the largest logits of each row of [S, V]; -1 if a logit is not finite."""
    num_rows, vocab_size = logits.shape
    if logits.is_cpu and logits.dtype in _TYPES and logits.stride(1) == 1 and 0 < vocab_size < _MOST_TOKENS:
        kernel = _kernel()
        if kernel is not None:
            tokens = torch.empty(num_rows, dtype=torch.int64)
            kernel(
                logits.data_ptr(), tokens.data_ptr(), num_rows, vocab_size, logits.stride(0),
                logits.dtype is torch.bfloat16, torch.get_num_threads(),
            )  # fmt: skip
            return tokens
    # A sum is finite if every term is (logits are far from overflow); this takes one fast pass.
    usable = logits.sum(-1, dtype=torch.float32).isfinite()
    return logits.argmax(-1).masked_fill_(~usable, -1)


def parts(num_rows: int, width: int, most: int) -> Iterator[slice]:
    """Slices of rows with scratch tensors, of `width` elements for each row, of `most` elements at most."""
    step = max(1, most // width)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)


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


def add_noise(logits: Tensor, keys: Tensor) -> None:
    """Adds each row's noise to logits [R, V] in place; tokens that a filter removed stay at -inf."""
    num_rows, vocab_size = logits.shape
    tokens = torch.arange(vocab_size, device=logits.device)
    for part in parts(num_rows, vocab_size, MAX_SCRATCH):
        logits[part] += gumbel_noise(keys[part, None], tokens)


def rank_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, *, few: bool) -> Tensor:
    """Returns the smallest logit that top-k and then top-p keep, [G].

    The result does not depend on the number of ranks evaluated: sums begin with the most probable token and are
    compared with the sum of the whole row, or of its top_k.
    """
    num_rows, vocab_size = logits.shape
    if few or logits.device.type != "cpu" or vocab_size <= SMALL_VOCABULARY:
        num_ranks = FEW_RANKS if few else vocab_size
        at_once = parts(num_rows, min(num_ranks, vocab_size), MAX_SCRATCH)
        thresholds = [threshold_within(logits[at], top_k[at], top_p[at], None, num_ranks)[0] for at in at_once]
        return thresholds[0] if len(thresholds) == 1 else torch.cat(thresholds)
    # The most probable token's share of the row.
    peak = logits.softmax(-1).amax(-1)
    threshold = torch.empty_like(peak)
    left = torch.arange(num_rows)
    for num_ranks in (*(size for size in _CPU_RANKS if size <= vocab_size // 4), vocab_size):
        whole = left.numel() == num_rows
        rows = logits if whole else logits.index_select(0, left)
        within_ranks, settled = threshold_within(rows, top_k[left], top_p[left], peak[left], num_ranks)
        threshold[left] = within_ranks
        left = left[~settled]
        if not left.numel():
            break
    return threshold


def threshold_within(
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


def typical(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): float32 [G, V], -inf for the tokens that are removed.

    Keeps the tokens with information, -log p, closest to the row's entropy, until they hold typical_p [G]. Tokens
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


# By parameter: float32 [G, V] and values [G] to [G, V], with -inf for the tokens that are removed. A value that keeps
# all tokens is never given.
LATE_FILTERS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"typical_p": typical}
