"""Gated feed-forward modules of a model, recognised by what they compute: down(activation(gate(x)) * up(x)).

Gate and up are two linear layers, or the halves of one. A run of the module shows what its linear layers receive and
return, and so which layer is which and which activation it has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.cpu_operators.forward import NativeForward
from gpu_worker.cpu_operators.norms import TOLERANCE
from gpu_worker.cpu_operators.operators import Activation, gated

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: nn.functional.silu,
    Activation.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
}
# Of the inputs, so that the gates cover the range in which activations differ.
_SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)
_TELLING = (0.5, 4.0)


class NativeGate(NativeForward):
    """In place of the forward of a gated feed-forward module."""

    def __init__(
        self, module: nn.Module, inner: tuple[nn.Module, ...], down: nn.Module, is_swapped: bool, activation: Activation
    ) -> None:
        super().__init__(module)
        self._inner, self._down = inner, down
        self._is_swapped, self.activation = is_swapped, activation

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return self.own(x, *args, **options)
        gate, up = _parts([layer(x) for layer in self._inner], self._is_swapped)
        found = gated(gate, up, self.activation)
        return self._down(_ACTIVATIONS[self.activation](gate) * up if found is None else found)


def _parts(outputs: list[Tensor], is_swapped: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, of the outputs of two layers or of the halves of one."""
    one, other = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
    return (other, one) if is_swapped else (one, other)


@dataclass
class _Calls:
    """What the linear layers of a module received and returned in one run."""

    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    count: int = 0

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.inputs[layer], self.outputs[layer] = args[0], output
        self.count += 1


def native_gate(module: nn.Module) -> NativeGate | None:
    """The module's native forward; None if it computes something else."""
    linears: list[Any] = [child for child in module.children() if hasattr(child, "in_features")]
    if len(linears) not in (2, 3) or any(True for _ in module.parameters(recurse=False)):
        return None
    down = linears[-1]
    others = [child for child in module.children() if child not in linears]
    if any(True for child in others for _ in child.parameters()):
        return None
    calls = _Calls()
    result, x = _run(module, linears, calls)
    if result is None or calls.count != len(linears):
        return None
    # The last layer is called last, and returns the result.
    inner = tuple(linears[:-1])
    if not torch.equal(calls.outputs[down], result) or any(calls.inputs[layer] is not x for layer in inner):
        return None
    for is_swapped, activation in _forms():
        gate, up = _parts([calls.outputs[layer] for layer in inner], is_swapped)
        if _is_equal(gate, up, calls.inputs[down], activation):
            return NativeGate(module, inner, down, is_swapped, activation)
    return None


def _forms() -> Iterator[tuple[bool, Activation]]:
    return ((is_swapped, activation) for activation in _ACTIVATIONS for is_swapped in (False, True))


def _run(module: nn.Module, linears: list[Any], calls: _Calls) -> tuple[Tensor | None, Tensor]:
    """The result of one run, and its input [1, n, features]; None if the module does not take one tensor."""
    first = linears[0]
    dtype = first.weight.dtype
    x = torch.randn((1, len(_SCALES), int(first.in_features)), generator=torch.Generator().manual_seed(1))
    x = (x * torch.tensor(_SCALES)[:, None]).to(dtype)
    hooks = [layer.register_forward_hook(calls) for layer in linears]
    try:
        result = module(x)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        result = None
    finally:
        for hook in hooks:
            hook.remove()
    return result if isinstance(result, Tensor) else None, x


def _is_equal(gate: Tensor, up: Tensor, product: Tensor, activation: Activation) -> bool:
    """Whether the native product is the module's, within rounding of its terms."""
    least, most = _TELLING
    telling = (gate.abs() > least) & (gate.abs() < most)
    found = gated(gate, up, activation)
    if found is None or found.shape != product.shape or not bool(telling.any()):
        return False
    error, allowed = (found.float() - product.float()).abs(), TOLERANCE[gate.dtype] * (gate * up).float().abs()
    return bool((error <= allowed).all())
