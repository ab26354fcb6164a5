"""Rotary embeddings of a model's queries and keys, recognised by what they compute.

Transformers' attention modules call a function of their own Python module, which takes queries, keys, cosines and
sines. Where its results are those of the native operator, the attention module's forward is copied with the native
function under that name. A decorated forward is copied with its decorators, which hold it in a closure. The Python
module itself stays as it is.
"""

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.cpu_operators.forward import NativeForward
from gpu_worker.cpu_operators.norms import TOLERANCE
from gpu_worker.cpu_operators.operators import rotary

# Queries, keys, cosines and sines.
_NUM_ARGUMENTS = 4

Rotation = Callable[..., tuple[Tensor, Tensor]]


class NativeRotations(NativeForward):
    """In place of the forward of an attention module: a copy of it, which calls native rotations."""

    def __init__(self, module: nn.Module, forward: FunctionType) -> None:
        super().__init__(module)
        self._forward = forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._forward(self._module, *args, **options)


class _NativeRotation:
    """In place of a function that rotates queries and keys [1, heads, T, D] by cosines and sines [1, T, R]."""

    def __init__(self, own: Rotation, *, rotates_parts: bool) -> None:
        """own: the model's function. rotates_parts: whether R may be less than D."""
        self._own, self._rotates_parts = own, rotates_parts

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        is_whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if (is_whole or self._rotates_parts) and not (args or options):
            query, key = rotary(q, cos, sin), rotary(k, cos, sin)
            if query is not None and key is not None:
                return query, key
        return self._own(q, k, cos, sin, *args, **options)


def native_rotations(module: nn.Module, known: dict[FunctionType, FunctionType | None]) -> NativeRotations | None:
    """The module's forward with native rotations; None if there is nothing to replace.

    known: the copies that were made before, by the forwards of their classes.
    """
    own = type(module).forward
    if not isinstance(own, FunctionType):
        return None
    if own not in known:
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        known[own] = _with_native_rotations(own, dtype)
    forward = known[own]
    return None if forward is None else NativeRotations(module, forward)


def _with_native_rotations(
    forward: FunctionType, dtype: torch.dtype, within: tuple[FunctionType, ...] = ()
) -> FunctionType | None:
    """A copy of a forward, or of a decorator around it, that calls native rotations; None if it calls none.

    within: the decorators around it.
    """
    names = (name for name in forward.__code__.co_names if name in forward.__globals__)
    natives = {name: native for name in names if (native := _recognised(forward.__globals__[name], dtype)) is not None}
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


def _recognised(function: object, dtype: torch.dtype) -> Rotation | None:
    if not isinstance(function, FunctionType) or not _takes_four(function) or not _is_equal(function, 16, 16, dtype):
        return None
    return _NativeRotation(function, rotates_parts=_is_equal(function, 24, 16, dtype))


def _takes_four(function: FunctionType) -> bool:
    """Whether a call needs four arguments by position, and no more."""
    parameters = inspect.signature(function).parameters.values()
    needed = [each for each in parameters if each.default is each.empty]
    return len(needed) == _NUM_ARGUMENTS and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in needed)


def _is_equal(function: FunctionType, dim: int, rotated: int, dtype: torch.dtype) -> bool:
    """Whether the function rotates the first `rotated` of `dim` elements as the native operator does."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn((1, 5, heads, dim), generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn((1, 5, rotated), generator=generator).to(dtype) for _ in range(2))
    try:
        found = function(query, key, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    for x, own in zip((query, key), found, strict=True):
        native = rotary(x, cos, sin)
        if native is None or not isinstance(own, Tensor) or own.shape != native.shape or own.dtype != native.dtype:
            return False
        # Of the terms of a sum, which may cancel.
        if not torch.allclose(own, native, rtol=0, atol=TOLERANCE[dtype] * 16):
            return False
    return True
