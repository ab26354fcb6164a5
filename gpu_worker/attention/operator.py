"""Attention of a layer in a step, as one operator: K and V go to the pool, then decode rows and prompt chunks attend.

`torch.ops.tandem.attend` is opaque to compilers: a decoder layer that is compiled around it calls it as it stands, with
the kernels that were compiled for its step. Its arguments determine everything that it does, so it can be called again
with the same arguments, as a recorder of graphs does. The step is the number of a `StepContext`; contexts are found
while something else holds them. Knows nothing of models.

Library.define is used because its operators cost 4 us per call, those of `torch.library.custom_op` 9 us (on a CPU).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Compilers specialise on 0 and 1.
_numbers = count(2)
_contexts: "WeakValueDictionary[int, StepContext]" = WeakValueDictionary()


class QueryKernel(Protocol):
    """Places queries in a kernel's call and runs it."""

    def __call__(
        self, query_THD: Tensor, places: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Output [places of the kernel, H, value dimension] of queries [T, H, key dimension] at `places` int64 [T].

        places: None if query i has place i, and every place has a query. key and value [K, N, D]; sinks [H]."""
        ...


# Not frozen, because compilers read every field of a frozen dataclass that is passed to a compiled layer, and compile
# again if one changes.
@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class StepContext:
    """One step, as each layer sees it. Tokens are packed: decode rows, then chunks, then padding."""

    # int64 [T]: the token slot for each token's K and V; padding goes to page 0.
    kv_slots: Tensor
    # By layer; layers of one kind share them. None if the step has no decode rows, or no chunks.
    decode: Sequence[QueryKernel] | None
    # int64 [tokens of the decode part]; None if token i has slot i, and every slot has a token.
    decode_slots: Tensor | None
    num_decode: int
    prefill: Sequence[QueryKernel] | None
    # int64 [tokens of the chunks]: where each query is placed, all different. Padding that is counted to the chunks
    # takes places of queries that the mask hides.
    prefill_places: Tensor
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

    Indexed assignment (index_put_) is used because index_copy_ copied the whole pool inside compiled models.
    """
    context = _contexts[step]
    keys[:, context.kv_slots, : key.shape[3]] = key[0]
    values[:, context.kv_slots, : value.shape[3]] = value[0]
    query_THD = query[0].transpose(0, 1)
    num_decode, num_chunk = context.num_decode, context.prefill_places.shape[0]
    num_tokens, num_attending = query_THD.shape[0], num_decode + num_chunk
    # Outputs of the two parts, and the rows of them that belong to the tokens; None for all rows in order.
    parts: list[tuple[Tensor, Tensor | None]] = []
    if context.decode is not None:
        rows = context.decode[layer](query_THD[:num_decode], context.decode_slots, keys, values, sinks)
        parts.append((rows, context.decode_slots))
    if context.prefill is not None:
        chunks = query_THD[num_decode:num_attending]
        of_places = context.prefill[layer](chunks, context.prefill_places, keys, values, sinks)
        parts.append((of_places, context.prefill_places))
    if len(parts) == 1 and num_attending == num_tokens:
        part, places = parts[0]
        return (part.contiguous() if places is None else part.index_select(0, places)).unsqueeze(0)
    out = query.new_empty(num_tokens, query.shape[1], value.shape[3])
    begin = 0
    for part, places in parts:
        end = begin + (part.shape[0] if places is None else places.shape[0])
        if places is None:
            out[begin:end] = part
        else:
            torch.index_select(part, 0, places, out=out[begin:end])
        begin = end
    if begin < num_tokens:
        # Padding, which the rest of the model computes with.
        out[begin:].zero_()
    return out.unsqueeze(0)


def _shape_of_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    keys: Tensor,
    values: Tensor,
    step: int,
    layer: int,
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_library = torch.library.Library("tandem", "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor(a!) keys, Tensor(b!) values, SymInt step, "
    "int layer) -> Tensor"
)
for _device_type in ("CPU", "CUDA"):
    _library.impl("attend", attend, _device_type)
torch.library.register_fake("tandem::attend", _shape_of_attend, lib=_library)
