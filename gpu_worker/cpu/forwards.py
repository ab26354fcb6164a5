"""Native forwards in place of those of a model's modules, recognised by what they compute, so that no class is named.

A norm is a module without children, with one parameter (a vector w) and a small positive number among its attributes,
epsilon; its results are x / sqrt(mean(x^2) + epsilon) times w or 1 + w.

A gated feed-forward module computes down(activation(gate(x)) * up(x)). Gate and up are two linear layers, or the halves
of one. A run of the module shows what its linear layers receive and return, and so which layer is which and which
activation it has.

Rotary embeddings: Transformers' attention modules call a function of their own Python module, which takes queries,
keys, cosines and sines. Where its results are those of the native operator, the attention module's forward is copied
with the native function under that name. A decorated forward is copied with its decorators, which hold it in a closure.
The Python module itself stays as it is.
"""

import copy
import inspect
from collections.abc import Callable
from itertools import product
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.cpu.operators import Activation, gated, rms_norm, rotary

# The relative error of an element: a few roundings of float32; of bfloat16 at most three in a module and one here.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6}
_LARGEST_EPSILON = 1e-2
# Scales of the inputs. At the least, epsilon decides the result.
_NORM_SCALES = (1e-3, 1.0, 30.0)
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: nn.functional.silu,
    Activation.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
}
# Scales of the inputs, so that the gates cover the range in which activations differ.
_GATE_SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)
_TELLING = (0.5, 4.0)
# Queries, keys, cosines and sines.
_NUM_ARGUMENTS = 4
Rotation = Callable[..., tuple[Tensor, Tensor]]


class NativeForward:
    """In place of the forward of one module. An attribute of an instance comes before its class's method."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def own(self, *args: Any, **options: Any) -> Any:
        return type(self._module).forward(self._module, *args, **options)


def restore_forwards(model: nn.Module) -> None:
    """Takes away every native forward. Compilers fuse the modules' own operators, and do not see into native ones."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), NativeForward):
            del module.forward


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
        native = None if args or options else rms_norm(x, self._weight, self._epsilon)
        return self.own(x, *args, **options) if native is None else native


def native_norm(module: nn.Module) -> NativeNorm | None:
    """The module's native forward; None if it is not such a norm."""
    parameters = list(module.parameters(recurse=False))
    if len(parameters) != 1 or parameters[0].dim() != 1 or any(True for _ in module.children()):
        return None
    # Itself, and one tensor.
    if not _takes(type(module).forward, 2):
        return None
    weight = parameters[0].detach().float().contiguous()
    epsilons = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _LARGEST_EPSILON}
    for epsilon in epsilons:
        for offset in (0.0, 1.0):
            factor = weight + offset if offset else weight
            if _is_norm(module, factor, epsilon):
                return NativeNorm(module, factor, epsilon, offset=offset)
    return None


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a call needs exactly this many arguments by position."""
    needed = [item for item in inspect.signature(function).parameters.values() if item.default is item.empty]
    return len(needed) == count and all(item.kind is item.POSITIONAL_OR_KEYWORD for item in needed)


def _is_norm(module: nn.Module, weight: Tensor, epsilon: float) -> bool:
    """Compares results in float32, where the formula shows, and in the module's own type."""
    generator = torch.Generator().manual_seed(1)
    dtype, size = next(module.parameters()).dtype, weight.shape[0]
    exact = copy.deepcopy(module).float()
    for scale in _NORM_SCALES:
        # As a hidden state, and as heads that are a part of a wider product.
        hidden = torch.randn((1, 3, size), generator=generator) * scale
        heads = torch.randn((1, 3, 2 * size + 8), generator=generator)[..., : 2 * size].view(1, 3, 2, size) * scale
        for x in (hidden, heads):
            for same, like in ((exact, x), (module, x.to(dtype))):
                if not _close(_result(same, like), rms_norm(like, weight, epsilon)):
                    return False
    return True


def _result(function: Callable[..., Any], *args: Tensor) -> Any:
    """What a model's function returns; None if it does not take these arguments."""
    try:
        return function(*args)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _close(one: Any, other: Tensor | None) -> bool:
    if not isinstance(one, Tensor) or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(other, one, rtol=TOLERANCE[one.dtype], atol=0)


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
        native = gated(gate, up, self.activation)
        return self._down(_ACTIVATIONS[self.activation](gate) * up if native is None else native)


def _parts(outputs: list[Tensor], is_swapped: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, of the outputs of two layers or of the halves of one."""
    one, other = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
    return (other, one) if is_swapped else (one, other)


def native_gate(module: nn.Module) -> NativeGate | None:
    """The module's native forward; None if it computes something else."""
    linears: list[Any] = [child for child in module.children() if hasattr(child, "in_features")]
    if len(linears) not in (2, 3) or any(True for _ in module.parameters(recurse=False)):
        return None
    down = linears[-1]
    others = [child for child in module.children() if child not in linears]
    if any(True for child in others for _ in child.parameters()):
        return None
    result, x, calls = _run(module, linears)
    inputs = {layer: received for layer, received, _ in calls}
    outputs = {layer: returned for layer, _, returned in calls}
    if result is None or not len(calls) == len(inputs) == len(linears):
        return None
    # The last layer is called last, and returns the result.
    inner = tuple(linears[:-1])
    if not torch.equal(outputs[down], result) or any(inputs[layer] is not x for layer in inner):
        return None
    for activation, is_swapped in product(_ACTIVATIONS, (False, True)):
        gate, up = _parts([outputs[layer] for layer in inner], is_swapped)
        if _is_gate(gate, up, inputs[down], activation):
            return NativeGate(module, inner, down, is_swapped, activation)
    return None


def _run(module: nn.Module, linears: list[Any]) -> tuple[Tensor | None, Tensor, list[tuple[Any, Tensor, Tensor]]]:
    """The result of one run, its input [1, n, features], and each call of a linear layer: layer, input and output.

    The result is None if the module does not take one tensor.
    """
    first = linears[0]
    dtype = first.weight.dtype
    x = torch.randn((1, len(_GATE_SCALES), int(first.in_features)), generator=torch.Generator().manual_seed(1))
    x = (x * torch.tensor(_GATE_SCALES)[:, None]).to(dtype)
    calls: list[tuple[Any, Tensor, Tensor]] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((layer, args[0], output))

    hooks = [layer.register_forward_hook(note) for layer in linears]
    try:
        result = _result(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    return result if isinstance(result, Tensor) else None, x, calls


def _is_gate(gate: Tensor, up: Tensor, product: Tensor, activation: Activation) -> bool:
    """Whether the native product is the module's, within rounding of its terms."""
    least, most = _TELLING
    telling = (gate.abs() > least) & (gate.abs() < most)
    native = gated(gate, up, activation)
    if native is None or native.shape != product.shape or not bool(telling.any()):
        return False
    error, allowed = (native.float() - product.float()).abs(), TOLERANCE[gate.dtype] * (gate * up).float().abs()
    return bool((error <= allowed).all())


class NativeRotations(NativeForward):
    """In place of the forward of an attention module: a copy of it, which calls native rotations."""

    def __init__(self, module: nn.Module, forward: FunctionType) -> None:
        super().__init__(module)
        self._forward = forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._forward(self._module, *args, **options)


def native_rotations(module: nn.Module, replaced: dict[FunctionType, FunctionType | None]) -> NativeRotations | None:
    """The module's forward with native rotations; None if there is nothing to replace.

    replaced: the copies that were made before, by the forwards of their classes.
    """
    original = type(module).forward
    if not isinstance(original, FunctionType):
        return None
    if original not in replaced:
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        replaced[original] = _with_native_rotations(original, dtype)
    forward = replaced[original]
    return None if forward is None else NativeRotations(module, forward)


def _with_native_rotations(
    forward: FunctionType, dtype: torch.dtype, within: tuple[FunctionType, ...] = ()
) -> FunctionType | None:
    """A copy of a forward, or of a decorator around it, that calls native rotations; None if it calls none.

    within: the decorators around it.
    """
    names = (name for name in forward.__code__.co_names if name in forward.__globals__)
    natives = {name: native for name in names if (native := _native_rotation(forward.__globals__[name], dtype))}
    cells = forward.__closure__ or ()
    copies = [_copied_content(cell, dtype, (*within, forward)) for cell in cells]
    if not natives and not any(copies):
        return None
    copied = FunctionType(
        forward.__code__,
        {**forward.__globals__, **natives} if natives else forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        tuple(cell if copy is None else CellType(copy) for cell, copy in zip(cells, copies, strict=True)),
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _copied_content(cell: CellType, dtype: torch.dtype, within: tuple[FunctionType, ...]) -> FunctionType | None:
    """The copy of the function that a decorator's closure holds; None if there is nothing to replace in it."""
    try:
        held = cell.cell_contents
    except ValueError:  # It is empty.
        return None
    is_new = isinstance(held, FunctionType) and held not in within
    return _with_native_rotations(held, dtype, within) if is_new else None


def _native_rotation(function: object, dtype: torch.dtype) -> Rotation | None:
    """In place of a function that rotates queries and keys [1, heads, T, D] by cosines and sines [1, T, R], or None."""
    if not isinstance(function, FunctionType) or not _takes(function, _NUM_ARGUMENTS):
        return None
    if not _is_rotation(function, 16, 16, dtype):
        return None
    # Whether R may be less than D.
    rotates_parts = _is_rotation(function, 24, 16, dtype)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        is_whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if (is_whole or rotates_parts) and not (args or options):
            query, key = rotary(q, cos, sin), rotary(k, cos, sin)
            if query is not None and key is not None:
                return query, key
        return function(q, k, cos, sin, *args, **options)

    return rotated


def _is_rotation(function: FunctionType, dim: int, rotated: int, dtype: torch.dtype) -> bool:
    """Whether the function rotates the first `rotated` of `dim` elements as the native operator does."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn((1, 5, heads, dim), generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn((1, 5, rotated), generator=generator).to(dtype) for _ in range(2))
    outputs = _result(function, query, key, cos, sin)
    if not isinstance(outputs, tuple) or len(outputs) != 2:
        return False
    for x, out in zip((query, key), outputs, strict=True):
        native = rotary(x, cos, sin)
        if native is None or not isinstance(out, Tensor) or out.shape != native.shape or out.dtype != native.dtype:
            return False
        # Relative to the terms of a sum, which may cancel.
        if not torch.allclose(out, native, rtol=0, atol=TOLERANCE[dtype] * 16):
            return False
    return True
