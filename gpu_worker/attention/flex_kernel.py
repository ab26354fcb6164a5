"""The calls of FlexAttention: changes to scores, compiled code of each, how queries are placed and outputs taken.

Uncompiled FlexAttention ignores the block lists and applies the mask function alone, which gives wrong results with
these masks; `FlexKernel` raises instead. Knows nothing of plans, rows or pages: masks are arguments.

Shape legend: T packed tokens, H query heads, K KV heads, G query heads per KV head, D head dimension in the pool, B
decode slots, P prefill queries, N the pool's token slots.
"""

from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gpu_worker.attention.block_mask import DecodeMask, PrefillMask
from gpu_worker.attention.kernel_options import Call, Card, kernel_options
from gpu_worker.attention.layers import AttentionKind

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

_kernel_numbers = count(1)


class UncompiledAttentionError(RuntimeError):
    """FlexAttention was about to run without its compiled kernel."""


def _with_own_code(function: FunctionType) -> FunctionType:
    """A copy with its own code object. Dynamo keeps compiled entries, their guards and the limit of recompiles by code
    object; kernels that shared one would use up each other's limit, past which FlexAttention runs uncompiled."""
    code = function.__code__.replace(co_name=f"flex_kernel_{next(_kernel_numbers)}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


def _guards_on_tensors(guards: "Sequence[GuardFilterEntry]") -> list[bool]:
    """Keeps the guards on a call's tensors. The others never change for a kernel, because it has its own code and mask;
    but some depend on the whole process (the number of classes that pytree knows grows with any import) and would
    compile the kernel again in the middle of serving."""
    return [guard.guard_type == "TENSOR_MATCH" for guard in guards]


class FlexKernel:
    """One FlexAttention call at static shapes; compiled at its first call."""

    def __init__(
        self,
        kind: AttentionKind,
        mask: BlockMask,
        *,
        learned_sink_slot: int | None,
        rows_are_heads: bool,
        options: Any,
    ) -> None:
        """options: FlexAttention's `kernel_options`.

        rows_are_heads: query rows are the heads of one KV head, and learned sinks are [K, G]; otherwise [H]."""
        softcap, scale = kind.softcap, kind.scale
        grouped = not rows_are_heads and kind.group > 1

        def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                raise UncompiledAttentionError("FlexAttention was called uncompiled; its result would be wrong")

            def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if learned_sink_slot is not None:
                    # V of this slot is zero: the sink takes part in the softmax and adds nothing.
                    sink = sinks[h, q_idx] if rows_are_heads else sinks[h]  # type: ignore[index]
                    score = torch.where(kv_idx == learned_sink_slot, sink, score)
                return score

            return flex_attention(
                query,
                key,
                value,
                score_mod=None if softcap is None and learned_sink_slot is None else score_mod,
                block_mask=mask,
                scale=scale,
                enable_gqa=grouped,
                kernel_options=options,
            )

        # A CPU's kernels have buffers for this number of threads; as a setting it is part of the key in the compiler's
        # cache, so that a process with more threads never gets them.
        self._num_threads = torch.get_num_threads()
        settings = {"guard_filter_fn": _guards_on_tensors, "cpp.threads": self._num_threads}
        self._compiled: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = torch.compile(
            _with_own_code(call), dynamic=False, fullgraph=True, options=settings
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        assert not query.is_cpu or torch.get_num_threads() <= self._num_threads, (
            "torch has more threads than the kernel was compiled for"
        )
        return self._compiled(query, key, value, sinks)


class DecodeAttention:
    """One query position per slot. The query heads of a group are query rows of its KV head: [B, K, G, D]."""

    def __init__(self, kind: AttentionKind, mask: DecodeMask, *, dtype: torch.dtype) -> None:
        slots, device = mask.block_lists.shape[0], mask.block_lists.device
        self.kind, self.mask = kind, mask
        self.query = torch.zeros(slots, kind.num_kv_heads, kind.group, kind.head_dim, dtype=dtype, device=device)
        self._written = self.query[..., : kind.key_dim]
        blocks = mask.block_mask(kind.group)
        self.kernel = FlexKernel(
            kind,
            blocks,
            learned_sink_slot=mask.view.learned_sink_slot,
            rows_are_heads=True,
            options=kernel_options("decode", Card.of(device), Call.of(kind, blocks, bucket=slots, dtype=dtype)),
        )

    def __call__(
        self, query_THD: Tensor, sources: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Output [B, H, value dimension] of queries [B, H, key dimension], one for each slot in order; key and value
        [K, N, D]; sinks [H]. sources: None, because every slot has a query."""
        grouped = query_THD.shape[0], *self.query.shape[1:3], self.kind.key_dim
        query = self.query
        if self.kind.key_dim < self.kind.head_dim:
            self._written.copy_(query_THD.view(grouped))
        else:
            # The kernel reads the model's own queries. It is compiled for one set of strides, and sizes of 1 may have
            # any.
            query = query_THD.contiguous().as_strided(self.query.shape, self.query.stride())
        if sinks is not None:
            sinks = sinks.view(self.query.shape[1:3])
        out = self.kernel(query, key.unsqueeze(0), value.unsqueeze(0), sinks)
        return out.flatten(1, 2)[..., : self.kind.value_dim]


class PrefillAttention:
    """Prompt chunks, packed along the query axis: [1, H, P, D]."""

    def __init__(self, kind: AttentionKind, mask: PrefillMask, *, dtype: torch.dtype) -> None:
        num_queries, device = mask.q_positions.shape[0], mask.q_positions.device
        self.kind, self.mask = kind, mask
        self.query = torch.zeros(num_queries, kind.num_heads, kind.head_dim, dtype=dtype, device=device)
        self._written = self.query[..., : kind.key_dim]
        call = Call.of(kind, mask.block_mask, bucket=num_queries, dtype=dtype)
        self.kernel = FlexKernel(
            kind,
            mask.block_mask,
            learned_sink_slot=mask.view.learned_sink_slot,
            rows_are_heads=False,
            options=kernel_options("prefill", Card.of(device), call),
        )

    def __call__(
        self, query_THD: Tensor, sources: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Output [P, H, value dimension] of queries [T, H, key dimension], taken by `sources` int64 [P]; key and value
        [K, N, D]; sinks [H]."""
        assert sources is not None
        torch.index_select(query_THD, 0, sources, out=self._written)
        query = self.query.transpose(0, 1).unsqueeze(0)
        out = self.kernel(query, key.unsqueeze(0), value.unsqueeze(0), sinks)
        return out.squeeze(0).transpose(0, 1)[..., : self.kind.value_dim]
