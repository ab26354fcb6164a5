"""Random weights that expose faults: larger than Transformers' own, norms all different, biases and sinks not 0."""

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Draws every weight, and every buffer that a checkpoint has."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(_draw(name, tensor, generator))
    model.tie_weights()


def random_eager(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A random model with eager attention, which computes experts one by one, as the model's own code does."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype)
    if "Experts" in str(model):
        model.set_experts_implementation("eager")
    randomize(model, seed=5)
    return model.eval()


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    normal = torch.randn(tensor.shape, generator=generator)
    if tensor.ndim >= 2:
        # Keeps vectors about their length; scores of attention come out of order 1.
        return normal * 1.3 * (tensor.shape[-1] * tensor.shape[-2]) ** -0.25
    if "sink" in name:
        return normal + 1
    if "bias" in name:
        return normal * 0.2
    return 1 + normal * 0.2
