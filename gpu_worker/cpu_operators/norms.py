"""RMS norms of a model, recognised by what they compute.

A norm is a module without children, with one parameter (a vector w) and a small positive number among its attributes,
epsilon, whose results are x / sqrt(mean(x^2) + epsilon) times w or 1 + w. Its results show which, so no class is named.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.cpu_operators.forward import NativeForward
from gpu_worker.cpu_operators.operators import rms_norm

# Of an element: a few roundings of float32; of bfloat16 at most three roundings in a module and one here.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6}
_LARGEST_EPSILON = 1e-2
# Of the inputs. At the least, epsilon decides the result.
_SCALES = (1e-3, 1.0, 30.0)


class NativeNorm(NativeForward):
    """In place of the forward of an RMS norm."""

    def __init__(self, module: nn.Module, weight: Tensor, epsilon: float, *, offset: float) -> None:
        """offset: what the factor `weight` adds to the module's parameter."""
        super().__init__(module)
        self._weight, self._epsilon, self._offset = weight, epsilon, offset

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the module's parameter again, which has changed, into the same memory."""
        self._weight.copy_(next(self._module.parameters(recurse=False)).float() + self._offset)

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Any:
        found = None if args or options else rms_norm(x, self._weight, self._epsilon)
        return self.own(x, *args, **options) if found is None else found


def native_norm(module: nn.Module) -> NativeNorm | None:
    """The module's native forward; None if it is not such a norm."""
    parameters = list(module.parameters(recurse=False))
    if len(parameters) != 1 or parameters[0].dim() != 1 or any(True for _ in module.children()):
        return None
    if not _takes_one_tensor(module):
        return None
    weight = parameters[0].detach().float().contiguous()
    epsilons = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _LARGEST_EPSILON}
    for epsilon in epsilons:
        for offset in (0.0, 1.0):
            factor = weight + offset if offset else weight
            if _is_equal(module, factor, epsilon):
                return NativeNorm(module, factor, epsilon, offset=offset)
    return None


def _takes_one_tensor(module: nn.Module) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(type(module).forward).parameters.values()
        if parameter.default is inspect.Parameter.empty
    ]
    return len(required) == 2 and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in required)


def _is_equal(module: nn.Module, weight: Tensor, epsilon: float) -> bool:
    """Compares results in float32, where the formula shows, and in the module's own type."""
    generator = torch.Generator().manual_seed(1)
    dtype, size = next(module.parameters()).dtype, weight.shape[0]
    exact = copy.deepcopy(module).float()
    for scale in _SCALES:
        # As a hidden state, and as heads that are a part of a wider product.
        hidden = torch.randn((1, 3, size), generator=generator) * scale
        heads = torch.randn((1, 3, 2 * size + 8), generator=generator)[..., : 2 * size].view(1, 3, 2, size) * scale
        for x in (hidden, heads):
            for same, own in ((exact, x), (module, x.to(dtype))):
                if not _close(_result(same, own), rms_norm(own, weight, epsilon)):
                    return False
    return True


def _result(module: nn.Module, x: Tensor) -> Any:
    try:
        return module(x)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _close(one: Any, other: Tensor | None) -> bool:
    if not isinstance(one, Tensor) or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(other, one, rtol=TOLERANCE[one.dtype], atol=0)
