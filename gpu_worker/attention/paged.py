"""Paged attention as Transformers calls it: K and V go to the pool, then decode rows and prompt chunks attend.

Owns the layout of queries in a kernel's call and the attention function registered with Transformers. A step is an
argument, the `StepContext`. Knows nothing of plans or rows.

Shape legend: T packed tokens, H query heads, K KV heads, G query heads per KV head, D head dimension in the pool, B
decode slots, P prefill queries, N the pool's token slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gpu_worker.attention.block_mask import DecodeMask, PrefillMask
from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.attention.kernel_options import Call, Card, decode_options, prefill_options
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, LayerMap

ATTENTION_NAME = "tandem_paged"


def _without_padding(out_THD: Tensor, kind: AttentionKind) -> Tensor:
    return out_THD if out_THD.shape[2] == kind.value_dim else out_THD[..., : kind.value_dim].contiguous()


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
            options=decode_options(Card.of(device), Call.of(kind, blocks, bucket=slots, dtype=dtype)),
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
            learned_sink_slot=mask.view.learned_sink_slot,
            rows_are_heads=False,
            options=prefill_options(Card.of(device), Call.of(kind, mask.block_mask, bucket=num_queries, dtype=dtype)),
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
    # int64 [T]: the token slot for each token's K and V; padding goes to page 0.
    kv_slots: Tensor
    # By layer; None if the step has no decode rows, or no chunks.
    decode: Sequence[DecodeAttention] | None
    # int64 [tokens of the decode part].
    decode_slots: Tensor
    prefill: Sequence[PrefillAttention] | None
    # int64 [tokens of the chunks].
    prefill_places: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayer:
    """An attention module's layer of the pool and parameters."""

    index: int
    kind: AttentionKind

    def check(self, query: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> None:
        """Asserts that the model calls attention as in the compatibility check: the kernel computes only that."""
        kind = self.kind
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        assert scale == kind.scale, f"scaling is {scale}, the kernel has {kind.scale}"
        assert softcap == kind.softcap, f"softcap is {softcap}, the kernel has {kind.softcap}"
        assert (sinks is not None) is kind.pattern.has_learned_sinks, (
            "learned sinks are passed to a kernel without them, or the reverse"
        )


def attach(model: nn.Module, layers: LayerMap) -> None:
    """Gives each attention module its index in the map, which may differ from its own `layer_idx`."""
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
    """Registers `attn_implementation=ATTENTION_NAME`; without a mask function of that name no mask is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
