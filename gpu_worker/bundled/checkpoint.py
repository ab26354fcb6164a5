"""The training run's checkpoint: enough to go on after an interruption as if there had been none.

Owns: the file's layout (safetensors: parameter, and the optimiser's two moments of it). Knows nothing of data.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel


def save_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.AdamW, step: int) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors |= {f"{name}/value": parameter.detach()}
        tensors |= {f"{name}/{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"step": str(step)})
    temporary.replace(path)


def load_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.AdamW) -> int:
    """Put the saved values in place; returns the number of steps already done."""
    with safe_open(path, framework="pt") as saved:
        step = int(saved.metadata()["step"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(saved.get_tensor(f"{name}/value"))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": saved.get_tensor(f"{name}/exp_avg"),
                "exp_avg_sq": saved.get_tensor(f"{name}/exp_avg_sq"),
            }
    return step
