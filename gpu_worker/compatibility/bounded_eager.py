"""A model's own eager attention where it is served otherwise: the self-check's reference.

With the setting `window` the model makes its masks as usual, and positions that the setting hides are removed from
them. A rank of a group that keeps a part of the KV heads passes on only these. Owns the implementation name under which
this runs. Knows nothing of pages or kernels.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from gpu_worker.attention.layers import AttentionPattern, LayerMap
from gpu_worker.attention.paged import PagedLayer

BOUNDED_NAME = "tandem_bounded_eager"


def eager_name(model: PreTrainedModel, own: LayerMap | None) -> str:
    """The name of the eager implementation in which each layer sees what it is served with.

    own: the layers as the model has them. The name is `eager` unless a layer without a window is served with one, or a
    layer's KV heads are not all served.
    """
    bounded: dict[nn.Module, AttentionPattern] = {}
    keeps_part = False
    for layer in () if own is None else own.layers:
        module = model.get_submodule(layer.name)
        served: PagedLayer = module.paged_layer  # type: ignore[assignment]
        keeps_part |= served.first_kv_head is not None
        if layer.kind.pattern.window is None and served.kind.pattern.window is not None:
            bounded[module] = served.kind.pattern
    if not bounded and not keeps_part:
        return "eager"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **keywords: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module in bounded:
            attention_mask = _hiding(attention_mask, bounded[module])
        eager = sys.modules[type(module).__module__].eager_attention_forward
        layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
        key, value = layer.kept(key, value)
        with _repeating(module, layer):
            return eager(module, query, key, value, attention_mask, **keywords)

    AttentionInterface.register(BOUNDED_NAME, attend)
    AttentionMaskInterface.register(BOUNDED_NAME, eager_mask)
    return BOUNDED_NAME


@contextmanager
def _repeating(module: nn.Module, layer: PagedLayer) -> Iterator[None]:
    """Lets the module's eager attention repeat each KV head for as many query heads as read it in this process."""
    if layer.first_kv_head is None:
        yield
        return
    before = module.num_key_value_groups
    module.num_key_value_groups = layer.kind.group  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _hiding(mask: Tensor, pattern: AttentionPattern) -> Tensor:
    """The additive mask [1, 1, q, k] of one whole text, with the positions hidden that `pattern` hides."""
    assert pattern.window is not None
    query, key = (torch.arange(size, device=mask.device) for size in mask.shape[2:])
    hidden = (key >= pattern.sink_tokens) & (key <= query[:, None] - pattern.window)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
