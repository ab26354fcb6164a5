"""Computes logprobs of tokens, and of the most probable tokens at their positions, from the model's own logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of each scratch tensor; logits beyond that are processed in parts.
_MAX_SCRATCH = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Logprobs of m tokens, and the k most probable tokens for each: float32 [m], int32 [m, k], float32 [m, k]."""

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, top_k: int, rows: Tensor | None = None) -> LogprobTensors:
    """Returns logprobs of `tokens`, int64 [m], under logits [m, V], or under logits[rows]; the softmax is float32."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    step = max(1, _MAX_SCRATCH // logits.shape[1])
    for first in range(0, tokens.shape[0], step):
        part = slice(first, first + step)
        own = logits[part] if rows is None else logits.index_select(0, rows[part])
        logprobs = own.float().log_softmax(-1)
        top = logprobs.topk(top_k)
        parts.append((logprobs.gather(1, tokens[part, None])[:, 0], top.indices.int(), top.values))
    own, ids, values = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobTensors(logprobs=own, top_token_ids=ids, top_logprobs=values)
