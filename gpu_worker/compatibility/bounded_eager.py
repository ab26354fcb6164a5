"""A model's own eager attention bounded to a window: the self-check's reference if the setting `window` is given.

Owns the implementation name under which it runs. The model makes its masks as usual; positions that the setting hides
are then removed from them. Knows nothing of pages or kernels.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from gpu_worker.attention.layers import AttentionPattern, LayerMap

BOUNDED_NAME = "tandem_bounded_eager"


def eager_name(model: PreTrainedModel, own: LayerMap | None) -> str:
    """The name of the eager implementation in which each layer sees what it is served with.

    own: the layers as the model has them. The name is `eager` unless a layer without a window is served with one.
    """
    bounded: dict[nn.Module, AttentionPattern] = {}
    for layer in () if own is None else own.layers:
        module = model.get_submodule(layer.name)
        served: AttentionPattern = module.paged_layer.kind.pattern  # type: ignore[union-attr,assignment]
        if layer.kind.pattern.window is None and served.window is not None:
            bounded[module] = served
    if not bounded:
        return "eager"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **keywords: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module in bounded:
            attention_mask = _hiding(attention_mask, bounded[module])
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **keywords)

    AttentionInterface.register(BOUNDED_NAME, attend)
    AttentionMaskInterface.register(BOUNDED_NAME, eager_mask)
    return BOUNDED_NAME


def _hiding(mask: Tensor, pattern: AttentionPattern) -> Tensor:
    """The additive mask [1, 1, q, k] of one whole text, with the positions hidden that `pattern` hides."""
    assert pattern.window is not None
    query, key = (torch.arange(size, device=mask.device) for size in mask.shape[2:])
    hidden = (key >= pattern.sink_tokens) & (key <= query[:, None] - pattern.window)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
