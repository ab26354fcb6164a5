"""Paged attention as Transformers calls it: K and V go to the pool, then decode rows and prompt chunks attend.

Owns the compiled FlexAttention kernels, their options by device, and the attention function registered with
Transformers. Knows nothing of plans or rows: a step arrives as a `StepContext`. Shape legend: T packed tokens, H query
heads, K KV heads, G = H / K, D head dimension in the pool, B decode slots, P prefill queries, N the pool's token slots.

FlexAttention that runs uncompiled ignores the block lists and trusts the mask function alone, which is wrong for these
masks; `FlexKernel` raises instead.
"""

from collections.abc import Callable, Sequence
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
from gpu_worker.layers import AttentionKind, LayerMap

ATTENTION_NAME = "tandem_paged"
_kernel_numbers = count(1)


class UncompiledAttentionError(RuntimeError):
    """FlexAttention was about to run without its compiled kernel."""


def decode_options(device: torch.device, dtype: torch.dtype, page_size: int, head_dim: int) -> dict[str, Any]:
    """Kernel options of the decode call."""
    if device.type == "cpu":
        # Below the page size this selects the attention template: the CPU's decode template needs full blocks and
        # walks the whole pool.
        return {"PARTITION_SIZE": page_size // 2}
    # Raises where the split-KV decode kernel cannot be used, instead of falling back silently.
    options: dict[str, Any] = {"BACKEND": "TRITON_DECODE"}
    bytes_per_position = head_dim * dtype.itemsize
    if bytes_per_position > 1024:
        # K and V tiles of the usual 64 positions would not fit shared memory.
        options["BLOCK_N"] = min(32 if bytes_per_position <= 2048 else 16, page_size)
    return options


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
        sink_slot: int | None,
        rows_are_heads: bool,
        options: dict[str, Any],
    ) -> None:
        """rows_are_heads: query rows are the heads of one KV head, whose sinks are [K, G] then; else [H]."""
        softcap, scale = kind.softcap, kind.scale
        grouped = not rows_are_heads and kind.group > 1
        sink_of = _sink_of_row if rows_are_heads else _sink_of_head

        def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                raise UncompiledAttentionError("FlexAttention was called uncompiled; its result would be wrong")

            def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if sink_slot is not None:
                    # Its value in the pool is zero, so that the sink takes its share and adds nothing.
                    score = torch.where(kv_idx == sink_slot, sink_of(sinks, h, q_idx), score)
                return score

            return flex_attention(
                query,
                key,
                value,
                score_mod=None if softcap is None and sink_slot is None else score_mod,
                block_mask=mask,
                scale=scale,
                enable_gqa=grouped,
                kernel_options=options,
            )

        self._compiled: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = torch.compile(
            _with_own_code(call), dynamic=False, fullgraph=True
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return self._compiled(query, key, value, sinks)


def _without_padding(out_THD: Tensor, kind: AttentionKind) -> Tensor:
    return out_THD if out_THD.shape[2] == kind.value_dim else out_THD[..., : kind.value_dim].contiguous()


class DecodeAttention:
    """One query position per slot. A group of query heads stands as query rows of its KV head: [B, K, G, D]."""

    def __init__(self, kind: AttentionKind, mask: DecodeMask, *, dtype: torch.dtype) -> None:
        slots, device = mask.page_lists.shape[0], mask.page_lists.device
        self.kind, self.mask = kind, mask
        self.query = torch.zeros(slots, kind.num_kv_heads, kind.group, kind.head_dim, dtype=dtype, device=device)
        self._written = self.query[..., : kind.key_dim]
        self.kernel = FlexKernel(
            kind,
            mask.block_mask(kind.group),
            sink_slot=mask.view.sink_slot,
            rows_are_heads=True,
            options=decode_options(device, dtype, mask.view.page_size, kind.head_dim),
        )

    def __call__(self, query_THD: Tensor, slots: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Output [T, H, value dimension] of queries [T, H, key dimension] at `slots` int64 [T]; key and value
        [K, N, D]; sinks [H]."""
        num_tokens = query_THD.shape[0]
        self._written[slots] = query_THD.view(num_tokens, *self._written.shape[1:])
        if sinks is not None:
            sinks = sinks.view(self.query.shape[1:3])
        out = self.kernel(self.query, key.unsqueeze(0), value.unsqueeze(0), sinks)
        return _without_padding(out[slots].view(num_tokens, -1, out.shape[3]), self.kind)


class PrefillAttention:
    """Prompt chunks, packed along the query axis: [1, H, P, D]."""

    def __init__(self, kind: AttentionKind, mask: PrefillMask, *, dtype: torch.dtype) -> None:
        num_queries, device = mask.q_positions.shape[0], mask.q_positions.device
        self.kind, self.mask = kind, mask
        self.query = torch.zeros(num_queries, kind.num_heads, kind.head_dim, dtype=dtype, device=device)
        self._written = self.query[..., : kind.key_dim]
        self.kernel = FlexKernel(
            kind,
            mask.block_mask,
            sink_slot=mask.view.sink_slot,
            rows_are_heads=False,
            options=prefill_options(device, dtype, mask.view.page_size, mask.view.q_block, kind.head_dim),
        )

    def __call__(self, query_THD: Tensor, places: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Output [T, H, value dimension] of queries [T, H, key dimension] at `places` int64 [T] along P; key and value
        [K, N, D]; sinks [H]."""
        self._written[places] = query_THD
        query = self.query.transpose(0, 1).unsqueeze(0)
        out = self.kernel(query, key.unsqueeze(0), value.unsqueeze(0), sinks)
        return _without_padding(out.squeeze(0).transpose(0, 1)[places], self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One step, as each layer sees it. Tokens are packed: decode rows, then chunks, then padding."""

    cache: KvCache
    # int64 [T]: where each token's K and V go; padding goes to page 0.
    kv_slots: Tensor
    # By layer; None where the step has none.
    decode: Sequence[DecodeAttention] | None
    # int64 [tokens of the decode part].
    decode_slots: Tensor
    prefill: Sequence[PrefillAttention] | None
    # int64 [tokens of the chunks].
    prefill_places: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayer:
    """What an attention module knows of its place in the pool."""

    index: int
    kind: AttentionKind

    def check(self, query: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> None:
        """The model calls as it was examined; a kernel that computes something else would be wrong silently."""
        kind = self.kind
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        assert scale == kind.scale, f"scaling is {scale}, examined was {kind.scale}"
        assert softcap == kind.softcap, f"softcap is {softcap}, examined was {kind.softcap}"
        assert (sinks is not None) is kind.visibility.has_sinks, "sinks come where none were examined, or do not"


def attach(model: nn.Module, layers: LayerMap) -> None:
    """Tells each attention module its place in the map, which may differ from its own `layer_idx`."""
    for i, layer in enumerate(layers.layers):
        module = model.get_submodule(layer.name)
        module.paged_layer = PagedLayer(index=i, kind=layer.kind)  # type: ignore[assignment]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepContext,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, H, T, key dimension], key and value [1, K, T, own dimension] →
    [1, T, H, value dimension]."""
    assert attention_mask is None
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    layer.check(query, scaling, softcap, s_aux)
    step.cache.write(layer.index, step.kv_slots, key[0], value[0])
    pool = step.cache.keys[layer.index], step.cache.values[layer.index]
    query_THD = query[0].transpose(0, 1)
    num_decode, num_prefill = step.decode_slots.shape[0], step.prefill_places.shape[0]
    parts: list[Tensor] = []
    if step.decode is not None:
        rows = query_THD[:num_decode].contiguous()
        parts.append(step.decode[layer.index](rows, step.decode_slots, *pool, s_aux))
    if step.prefill is not None:
        chunks = query_THD[num_decode : num_decode + num_prefill]
        parts.append(step.prefill[layer.index](chunks, step.prefill_places, *pool, s_aux))
    num_padding = query_THD.shape[0] - num_decode - num_prefill
    if num_padding:
        parts.append(query.new_zeros(num_padding, layer.kind.num_heads, layer.kind.value_dim))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None


def register() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known; without a mask function of that name no mask is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
