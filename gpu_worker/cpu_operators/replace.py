"""Replaces the small operators of a loaded model by native ones, where they compute the same.

Owns the order of replacements and their count. Each is compared with the module that it replaces, on the real weights,
before it is used.
"""

from dataclasses import dataclass
from types import FunctionType

import torch
from torch import nn

from gpu_worker.cpu_operators.gates import native_gate
from gpu_worker.cpu_operators.norms import native_norm
from gpu_worker.cpu_operators.rotations import native_rotations
from gpu_worker.native.library import native_library


@dataclass(kw_only=True)
class Replaced:
    """How many modules of each kind have native operators."""

    norms: int = 0
    gates: int = 0
    rotations: int = 0

    def __str__(self) -> str:
        return f"{self.norms} norms, {self.gates} gated layers, {self.rotations} rotary embeddings"


@torch.no_grad()
def replace_operators(model: nn.Module) -> Replaced:
    """Replaces the forwards of the model's modules on a CPU; of none if the kernels cannot be built."""
    replaced = Replaced()
    if native_library() is None:
        return replaced
    copies: dict[FunctionType, FunctionType | None] = {}
    for module in model.modules():
        if "forward" in vars(module):
            # Transformers has replaced it, to share the module among ranks.
            continue
        # An attribute of the instance comes before the class's forward.
        if (norm := native_norm(module)) is not None:
            module.forward = norm
            replaced.norms += 1
        elif (gate := native_gate(module)) is not None:
            module.forward = gate
            replaced.gates += 1
        elif (rotations := native_rotations(module, copies)) is not None:
            module.forward = rotations
            replaced.rotations += 1
    return replaced
