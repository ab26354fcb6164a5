"""The training run's checkpoint: enough to go on after an interruption as if there had been none.

Owns: the file's layout (safetensors: each parameter, the optimisers' tensors about it, the step as metadata).
Knows nothing of data, nor which optimisers there are.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

_VALUE = "value"


def save_checkpoint(
    path: Path, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], num_steps_done: int
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{name}/{_VALUE}"] = parameter.detach()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"step": str(num_steps_done)})
    temporary.replace(path)


def load_checkpoint(path: Path, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Put the saved values in place; returns the number of steps already done."""
    parameters = dict(model.named_parameters())
    owners = {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    with safe_open(path, framework="pt") as saved:
        for full_key in saved.keys():  # noqa: SIM118 (not a mapping)
            name, key = full_key.rsplit("/", 1)
            parameter, value = parameters[name], saved.get_tensor(full_key)
            if key == _VALUE:
                parameter.data.copy_(value)
            else:
                owners[parameter].state[parameter][key] = value
        return int(saved.metadata()["step"])
