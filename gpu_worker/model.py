"""The model itself: checked, and once loaded put in the state that the runner needs.

Owns what is refused and why. No model code: Transformers' classes with this worker's attention. Knows nothing of
pages, plans or sockets.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_worker.linear import PackedLinear, can_pack, pack_linears
from gpu_worker.model_files import ModelRefused

PROVEN_MODEL_TYPES = ("llama", "qwen3")
# Rope types whose table does not depend on the largest position of the batch.
PROVEN_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_config(config: PreTrainedConfig) -> None:
    """Raises ModelRefused for what this worker would run wrongly or has not been proven on."""
    if config.model_type not in PROVEN_MODEL_TYPES:
        raise ModelRefused(
            f"model type {config.model_type} is not proven yet; proven are {', '.join(PROVEN_MODEL_TYPES)}"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in PROVEN_ROPE_TYPES:
        raise ModelRefused(
            f"rope type {rope_type} chooses one table from the longest sequence of a batch; "
            f"served are {', '.join(PROVEN_ROPE_TYPES)}"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelRefused("sliding-window layers are not served yet")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused("quantised weights are not served yet")
    head_dim = head_dim_of(config)
    if head_dim % 16 or head_dim > 256:
        raise ModelRefused(f"head dimension {head_dim} is not served; it must be a multiple of 16 up to 256")


def head_dim_of(config: PreTrainedConfig) -> int:
    """Dimension of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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
