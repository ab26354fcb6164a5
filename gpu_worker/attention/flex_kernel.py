"""One compiled FlexAttention call: its changes to scores, its own compiled code.

Uncompiled FlexAttention ignores the block lists and applies the mask function alone, which gives wrong results with
these masks; `FlexKernel` raises instead. Knows nothing of steps or pages: masks are arguments.
"""

from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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


def _sink_of_row(sinks: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
    return sinks[h, q_idx]


def _sink_of_head(sinks: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
    return sinks[h]


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
        sink_of: Any = _sink_of_row if rows_are_heads else _sink_of_head

        def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                raise UncompiledAttentionError("FlexAttention was called uncompiled; its result would be wrong")

            def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if learned_sink_slot is not None:
                    # V of this slot is zero: the sink takes part in the softmax and adds nothing.
                    score = torch.where(kv_idx == learned_sink_slot, sink_of(sinks, h, q_idx), score)
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
