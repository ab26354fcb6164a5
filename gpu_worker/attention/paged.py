"""Paged attention: one operator for a layer in a step, and the attention function by which Transformers calls it.

K and V go to the pool, then decode rows and prompt chunks attend. `torch.ops.tandem.attend` is opaque to compilers: a
decoder layer that is compiled around it calls it as it stands, with the kernels that were compiled for its step. Its
arguments determine everything that it does, so it can be called again with the same arguments, as a recorder of graphs
does. The step is the number of a `StepContext`; contexts are found while something else holds them.

Library.define is used because its operators cost 4 us per call, those of `torch.library.custom_op` 9 us (on a CPU).

Knows nothing of models, plans or rows. Shape legend: T packed tokens, H query heads, K KV heads, D head dimension in
the pool, N the pool's token slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, LayerMap

# Compilers specialise on 0 and 1.
_numbers = count(2)
_contexts: "WeakValueDictionary[int, StepContext]" = WeakValueDictionary()


# Writes keys and values [K, T, own dimension] to those of the pool [K, N, D], at token slots int64 [T].
WriteKv = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def assign_kv(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """A `WriteKv` for every device.

    Indexed assignment (index_put_) is used because index_copy_ copied the whole pool inside compiled models.
    """
    keys[:, slots, : key.shape[2]] = key
    values[:, slots, : value.shape[2]] = value


class QueryKernel(Protocol):
    """Places queries in a kernel's call and runs it."""

    def __call__(
        self, query_THD: Tensor, sources: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Output [places of the kernel, H, value dimension]; `sources` int64 [places] says which of the queries
        [T, H, key dimension] each place has.

        sources: None if place i has query i. key and value [K, N, D]; sinks [H]."""
        ...


class InPlaceKernel(Protocol):
    """Attends for packed tokens of the step and writes their outputs, on a CPU."""

    def __call__(self, query_THD: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out_THD: Tensor) -> None:
        """out_THD: contiguous [T, H, value dimension]; query_THD may have any strides; the others as in
        `QueryKernel`."""


# Not frozen, because compilers read every field of a frozen dataclass that is passed to a compiled layer, and compile
# again if one changes.
@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class StepContext:
    """One step, as each layer sees it. Tokens are packed: decode rows, then chunks, then padding."""

    # int64 [T]: the token slot for each token's K and V; padding goes to page 0.
    kv_slots: Tensor
    write_kv: WriteKv
    # By layer; layers of one kind share them. None if the step has no decode rows, or no chunks.
    decode: Sequence[QueryKernel] | Sequence[InPlaceKernel] | None
    num_decode: int
    prefill: Sequence[QueryKernel] | Sequence[InPlaceKernel] | None
    # int64 [tokens of the chunks]: where each query is placed, all different. Padding that is counted to the chunks
    # takes places of queries that the mask hides.
    prefill_places: Tensor
    # int64 [places of the kernel]: the token of the chunks that each place has; any, if the mask hides the place. To
    # take queries by it costs a fifth of writing them by `prefill_places`. None for an InPlaceKernel.
    prefill_sources: Tensor | None = None
    # Whether both are an InPlaceKernel.
    in_place: bool = False
    # Stands for the context in calls of the operator.
    number: int = field(init=False, default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _contexts[self.number] = self


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    keys: Tensor,
    values: Tensor,
    step: int,
    layer: int,
) -> Tensor:
    """Attention [1, T, H, value dimension] of query [1, H, T, key dimension]; writes key and value [1, K, T, own
    dimension] to the layer's pool, `keys` and `values` [K, N, D].

    sinks: [H]. step: `StepContext.number`. layer: the index of any layer of the same kind.
    """
    context = _contexts[step]
    context.write_kv(key[0], value[0], keys, values, context.kv_slots)
    query_THD = query[0].transpose(0, 1)
    num_decode, num_chunk = context.num_decode, context.prefill_places.shape[0]
    num_tokens, num_attending = query_THD.shape[0], num_decode + num_chunk
    # Any: `in_place` says which of the two kinds they are.
    decode: Any = None if context.decode is None else context.decode[layer]
    prefill: Any = None if context.prefill is None else context.prefill[layer]
    if not context.in_place and num_attending == num_tokens and (prefill is None or decode is None):
        # One kernel has all tokens: its output needs no copy if it is in their order.
        if prefill is None:
            assert decode is not None, "a step has tokens"
            return decode(query_THD, None, keys, values, sinks).contiguous().unsqueeze(0)
        rows = prefill(query_THD, context.prefill_sources, keys, values, sinks)
        return rows.index_select(0, context.prefill_places).unsqueeze(0)
    out = query.new_empty(num_tokens, query.shape[1], value.shape[3])
    parts = (
        (decode, None, slice(0, num_decode)),
        (prefill, context.prefill_sources, slice(num_decode, num_attending)),
    )
    for kernel, sources, part in parts:
        if kernel is None:
            continue
        if context.in_place:
            kernel(query_THD[part], keys, values, sinks, out[part])
            continue
        rows = kernel(query_THD[part], sources, keys, values, sinks)
        if sources is None:
            out[part] = rows
        else:
            torch.index_select(rows, 0, context.prefill_places, out=out[part])
    if num_attending < num_tokens:
        # Padding, which the rest of the model computes with.
        out[num_attending:].zero_()
    return out.unsqueeze(0)


_library = torch.library.Library("tandem", "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor(a!) keys, Tensor(b!) values, SymInt step, "
    "int layer) -> Tensor"
)
for _device_type in ("CPU", "CUDA"):
    _library.impl("attend", attend, _device_type)
torch.library.register_fake(
    "tandem::attend", lambda q, k, v, *_: q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]), lib=_library
)


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
        """Returns key and value [1, heads, T, D] of the heads that this process keeps."""
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
