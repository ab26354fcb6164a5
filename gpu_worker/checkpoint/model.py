"""The model itself, once loaded: put in the state that the runner needs. No model code: Transformers' classes with this
worker's attention. Knows nothing of pages, plans or sockets."""

import torch
from torch import nn
from transformers import PreTrainedModel

from gpu_worker.checkpoint.linear import PackedLinear, can_pack, pack_linears


def prepare(model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Puts a loaded model in the state that the runner needs."""
    model = model.to(device).eval()
    model.requires_grad_(False)
    if can_pack(device, dtype):
        pack_linears(model)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights, a tied one counted once, packed ones where they now are."""
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return packed + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
