"""Decides which tokens of a row the filters keep, with torch operators: top-k and top-p by rank, and typical-p.

Shape legend: G rows, V vocabulary.
"""

import torch
from torch import Tensor

from gpu_worker.sampling.inputs import FEW_RANKS

# Numbers of ranks that a CPU tries before it sorts the whole vocabulary: for 32 rows of 152,000 tokens this takes 7 or
# 50 ms instead of 460.
_CPU_RANKS = (256, 4096)
# Up to this size of the vocabulary, the whole row is sorted.
SMALL_VOCABULARY = 1023
# Elements of a scratch tensor; rows beyond that are processed in parts.
MAX_SCRATCH = 1 << 24


def rank_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, *, few: bool) -> Tensor:
    """Returns the smallest logit that top-k and then top-p keep, [G].

    The result does not depend on the number of ranks evaluated: sums begin with the most probable token and are
    compared with the sum of the whole row, or of its top_k.
    """
    num_rows, vocab_size = logits.shape
    if few or logits.device.type != "cpu" or vocab_size <= SMALL_VOCABULARY:
        num_ranks = FEW_RANKS if few else vocab_size
        step = max(1, MAX_SCRATCH // min(num_ranks, vocab_size))
        parts = [slice(first, first + step) for first in range(0, num_rows, step)]
        found = [threshold_within(logits[at], top_k[at], top_p[at], None, num_ranks)[0] for at in parts]
        return found[0] if len(found) == 1 else torch.cat(found)
    # The most probable token's share of the row.
    peak = logits.softmax(-1).amax(-1)
    threshold = torch.empty_like(peak)
    left = torch.arange(num_rows)
    for num_ranks in (*(size for size in _CPU_RANKS if size <= vocab_size // 4), vocab_size):
        whole = left.numel() == num_rows
        rows = logits if whole else logits.index_select(0, left)
        found, settled = threshold_within(rows, top_k[left], top_p[left], peak[left], num_ranks)
        threshold[left] = found
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
