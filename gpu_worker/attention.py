"""Paged attention as Transformers calls it: K and V go to the pool, then decode rows and prompt chunks attend.

Owns the compiled FlexAttention kernels, their options by device, and the attention function registered with
Transformers. Knows nothing of plans or rows: a step arrives as a `StepContext`. Shape legend: T packed tokens, H query
heads, K KV heads, G = H / K, D head dimension, B decode slots, P prefill queries, N token slots of the pool.

FlexAttention that runs uncompiled ignores the block lists and trusts the mask function alone, which is wrong for these
masks; `FlexKernel` raises instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from gpu_worker.block_mask import DecodeMask, PrefillMask
from gpu_worker.kv_cache import KvCache

ATTENTION_NAME = "tandem_paged"
_kernel_numbers = count(1)


class UncompiledAttentionError(RuntimeError):
    """FlexAttention was about to run without its compiled kernel."""


def decode_options(device: torch.device, page_size: int) -> dict[str, Any]:
    """Kernel options of the decode call."""
    if device.type == "cpu":
        # Below the page size this selects the attention template: the CPU's decode template needs full blocks and
        # walks the whole pool.
        return {"PARTITION_SIZE": page_size // 2}
    # Raises where the split-KV decode kernel cannot be used, instead of falling back silently.
    return {"BACKEND": "TRITON_DECODE"}


def prefill_options(
    device: torch.device, dtype: torch.dtype, page_size: int, q_block: int, head_dim: int
) -> dict[str, Any]:
    """Kernel options of the prefill call. Tiles must divide page and query tile, and fit shared memory."""
    if device.type == "cpu":
        return {"PARTITION_SIZE": page_size // 2}
    bytes_per_position = head_dim * dtype.itemsize
    block_m = 64 if bytes_per_position <= 512 else 32
    block_n = 64 if bytes_per_position <= 256 else 32 if bytes_per_position <= 512 else 16
    return {"BACKEND": "TRITON", "BLOCK_M": min(block_m, q_block), "BLOCK_N": min(block_n, page_size)}


def _with_own_code(function: FunctionType) -> FunctionType:
    """A copy with a code object of its own. Dynamo keeps compiled entries, their guards and the limit of recompiles by
    code object; kernels that shared one would use up each other's limit, past which FlexAttention runs uncompiled."""
    code = function.__code__.replace(co_name=f"flex_kernel_{next(_kernel_numbers)}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


class FlexKernel:
    """One FlexAttention call at static shapes; compiled at its first call."""

    def __init__(self, *, mask: BlockMask, scale: float, grouped: bool, options: dict[str, Any]) -> None:
        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                raise UncompiledAttentionError("FlexAttention was called uncompiled; its result would be wrong")
            return flex_attention(
                query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options
            )

        self.scale = scale
        self._compiled: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(
            _with_own_code(call), dynamic=False, fullgraph=True
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._compiled(query, key, value)


class DecodeAttention:
    """One query position per slot. A group of query heads stands as query rows of its KV head: [B, K, G, D]."""

    def __init__(
        self, mask: DecodeMask, *, num_kv_heads: int, group: int, head_dim: int, scale: float, dtype: torch.dtype
    ) -> None:
        slots, device = mask.page_lists.shape[0], mask.page_lists.device
        page_size = mask.block_mask.BLOCK_SIZE[1]
        self.mask = mask
        self.num_slots = slots
        self.query = torch.zeros(slots, num_kv_heads, group, head_dim, dtype=dtype, device=device)
        self.kernel = FlexKernel(
            mask=mask.block_mask, scale=scale, grouped=False, options=decode_options(device, page_size)
        )

    def __call__(self, query_THD: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output [T, H, D] of queries at `slots` int64 [T]; key and value [K, N, D]."""
        num_tokens, heads, head_dim = query_THD.shape
        self.query[slots] = query_THD.view(num_tokens, *self.query.shape[1:])
        out = self.kernel(self.query, key.unsqueeze(0), value.unsqueeze(0))
        return out[slots].view(num_tokens, heads, head_dim)


class PrefillAttention:
    """Prompt chunks, packed along the query axis: [1, H, P, D]."""

    def __init__(
        self,
        mask: PrefillMask,
        *,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        num_queries, device = mask.q_positions.shape[0], mask.q_positions.device
        self.mask = mask
        self.query = torch.zeros(num_queries, num_heads, head_dim, dtype=dtype, device=device)
        self.kernel = FlexKernel(
            mask=mask.block_mask,
            scale=scale,
            grouped=num_heads != num_kv_heads,
            options=prefill_options(device, dtype, page_size, mask.q_block, head_dim),
        )

    def __call__(self, query_THD: Tensor, places: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output [T, H, D] of queries at `places` int64 [T] along P; key and value [K, N, D]."""
        self.query[places] = query_THD
        query = self.query.transpose(0, 1).unsqueeze(0)
        out = self.kernel(query, key.unsqueeze(0), value.unsqueeze(0))
        return out.squeeze(0).transpose(0, 1)[places]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One step, as each layer sees it. Tokens are packed: decode rows, then chunks, then padding."""

    cache: KvCache
    # int64 [T]: where each token's K and V go; padding goes to page 0.
    kv_slots: Tensor
    # None where the step has none.
    decode: DecodeAttention | None
    # int64 [tokens of the decode part].
    decode_slots: Tensor
    prefill: PrefillAttention | None
    # int64 [tokens of the chunks].
    prefill_places: Tensor


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: StepContext,
    **_: object,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
    assert attention_mask is None
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    step.cache.write(layer_idx, step.kv_slots, key[0], value[0])
    keys, values = step.cache.keys[layer_idx], step.cache.values[layer_idx]
    query_THD = query[0].transpose(0, 1)
    num_decode, num_prefill = step.decode_slots.shape[0], step.prefill_places.shape[0]
    parts: list[Tensor] = []
    if step.decode is not None:
        assert step.decode.kernel.scale == scaling
        parts.append(step.decode(query_THD[:num_decode].contiguous(), step.decode_slots, keys, values))
    if step.prefill is not None:
        assert step.prefill.kernel.scale == scaling
        chunks = query_THD[num_decode : num_decode + num_prefill]
        parts.append(step.prefill(chunks, step.prefill_places, keys, values))
    num_padding = query_THD.shape[0] - num_decode - num_prefill
    if num_padding:
        parts.append(query_THD.new_zeros(num_padding, *query_THD.shape[1:]))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None


def register() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known; without a mask function of that name no mask is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
