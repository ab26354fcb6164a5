"""Logprobs of tokens and of the most probable ones beside them, from the model's own logits.

Owns their computation and their way to the host, with the step's tokens. Knows nothing of sampling or of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.wire.frames import TokenLogprobs

# Numbers of each scratch tensor; more logits than this are worked off in parts.
_MAX_SCRATCH = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """float32 [m], int32 [m, k] and float32 [m, k], on one device."""

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> "LogprobTensors":
        """The same in pinned memory, there once the stream has got so far."""
        return LogprobTensors(
            logprobs=pinned_copy(self.logprobs),
            top_token_ids=pinned_copy(self.top_token_ids),
            top_logprobs=pinned_copy(self.top_logprobs),
        )

    def arrays(self) -> TokenLogprobs:
        """The same as numpy arrays; for tensors on the host."""
        return TokenLogprobs(
            logprobs=self.logprobs.numpy(),
            top_token_ids=self.top_token_ids.numpy(),
            top_logprobs=self.top_logprobs.numpy(),
        )


def pinned_copy(tensor: Tensor) -> Tensor:
    """`tensor` in pinned host memory, copied in stream order without waiting."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def logprobs_of(logits: Tensor, tokens: Tensor, top_k: int, rows: Tensor | None = None) -> LogprobTensors:
    """Of `tokens`, int64 [m], under logits [m, V], or under those `rows` [m] of logits; softmax in float32."""
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
