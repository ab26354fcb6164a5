"""A model's own eager attention with less to see: what the self-check compares with where a window was set.

Owns the implementation name under which it runs. Knows nothing of pages or kernels; the model's masks stay its own, and
what the setting hides is taken from them.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from gpu_worker.attention.layers import LayerMap, Visibility

BOUNDED_NAME = "tandem_bounded_eager"


def eager_name(model: PreTrainedModel, own: LayerMap | None) -> str:
    """The implementation that shows each layer what it is served with: `eager`, unless one that sees everything by
    itself (`own`) is served with a window."""
    bounded: dict[nn.Module, Visibility] = {}
    for layer in () if own is None else own.layers:
        module = model.get_submodule(layer.name)
        served: Visibility = module.paged_layer.kind.visibility  # type: ignore[union-attr,assignment]
        if layer.kind.visibility.window is None and served.window is not None:
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


def _hiding(mask: Tensor, visibility: Visibility) -> Tensor:
    """An additive mask [1, 1, q, k] of one whole text that hides what `visibility` does."""
    assert visibility.window is not None
    query, key = (torch.arange(size, device=mask.device) for size in mask.shape[2:])
    hidden = (key >= visibility.leading) & (key <= query[:, None] - visibility.window)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
