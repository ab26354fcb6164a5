"""Paged attention as Transformers calls it: the attention function, which calls the operator of `operator.py`.

Knows nothing of kernels, plans or rows.

Shape legend: T packed tokens, H query heads, K KV heads, D head dimension in the pool, N the pool's token slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, LayerMap
from gpu_worker.attention.operator import StepContext

ATTENTION_NAME = "tandem_paged"


# Not frozen, for the reason given at StepContext.
@dataclass(slots=True, kw_only=True, eq=False)
class PagedLayer:
    """An attention module's layer of the pool and parameters."""

    # K and V [K, N, D].
    keys: Tensor
    values: Tensor
    # The first layer of the same kind. Layers of one kind differ in tensors only, so they share compiled code.
    kernel_idx: int
    kind: AttentionKind
    # As in `AttentionLayer`.
    first_kv_head: int | None = None

    def check(self, query: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> None:
        """Asserts that the model calls attention as in the compatibility check: the kernel computes only that."""
        kind = self.kind
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        assert scale == kind.scale, f"scaling is {scale}, the kernel has {kind.scale}"
        assert softcap == kind.softcap, f"softcap is {softcap}, the kernel has {kind.softcap}"
        assert (sinks is not None) is kind.pattern.has_learned_sinks, (
            "learned sinks are passed to a kernel without them, or the reverse"
        )

    def kept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Of key and value [1, heads, T, D], the heads that this process keeps."""
        if self.first_kv_head is None:
            return key, value
        heads = slice(self.first_kv_head, self.first_kv_head + self.kind.num_kv_heads)
        return key[:, heads], value[:, heads]


def attach(model: nn.Module, layers: LayerMap, cache: KvCache) -> None:
    """Gives each attention module its layer of the pool; its place in the map may differ from its own `layer_idx`."""
    first: dict[AttentionKind, int] = {}
    for i, layer in enumerate(layers.layers):
        module = model.get_submodule(layer.name)
        module.paged_layer = PagedLayer(  # type: ignore[assignment]
            keys=cache.keys[i],
            values=cache.values[i],
            kernel_idx=first.setdefault(layer.kind, i),
            kind=layer.kind,
            first_kv_head=layer.first_kv_head,
        )


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
    key, value = layer.kept(key, value)
    out = torch.ops.tandem.attend.default(
        query, key, value, s_aux, layer.keys, layer.values, step.number, layer.kernel_idx
    )
    return out, None


def register() -> None:
    """Registers `attn_implementation=ATTENTION_NAME`; without a mask function of that name no mask is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
