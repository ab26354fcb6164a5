"""Computes logprobs of tokens, and of the most probable tokens at their positions, from the model's own logits.

Of equal logits the token with the smaller id comes first, as in the greedy choice (`choice.py`): so a greedy token is
the first of the most probable ones. Logits decide and not logprobs, which may be equal where logits are not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of each scratch tensor; logits beyond that are processed in parts. On a CPU those of a thread stay in its
# cache, which takes a third of the time for 32 rows of 152,000.
_MAX_SCRATCH = 1 << 24
_CPU_SCRATCH = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Logprobs of m tokens, and the k most probable tokens for each: float32 [m], int32 [m, k], float32 [m, k]."""

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, top_k: int, rows: Tensor | None = None) -> LogprobTensors:
    """Returns logprobs of `tokens`, int64 [m], under logits [m, V], or under logits[rows]; the softmax is float32."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    scratch = min(_MAX_SCRATCH, torch.get_num_threads() * _CPU_SCRATCH) if logits.is_cpu else _MAX_SCRATCH
    step = max(1, scratch // logits.shape[1])
    for first in range(0, tokens.shape[0], step):
        part = slice(first, first + step)
        own = (logits[part] if rows is None else logits.index_select(0, rows[part])).float()
        logprobs, top = own.log_softmax(-1), _most_probable(own, top_k)
        parts.append((logprobs.gather(1, tokens[part, None])[:, 0], top.int(), logprobs.gather(1, top)))
    own, ids, values = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobTensors(logprobs=own, top_token_ids=ids, top_logprobs=values)


def _most_probable(logits: Tensor, top_k: int) -> Tensor:
    """Returns int64 [m, k]: the tokens of the largest of float32 logits [m, V], ordered by logit, then by id.

    Torch's topk leaves the order of equal numbers open, and which of them are among the k. So it gets numbers of which
    no two are equal: the bits of a logit, in an order that integers share, above those of the token.
    """
    if not top_k:
        return logits.new_empty((logits.shape[0], 0), dtype=torch.int64)
    # 0 is added so that the two zeros are one.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)
    return keys.topk(top_k).indices
