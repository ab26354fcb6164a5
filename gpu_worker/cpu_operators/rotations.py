"""Rotary embeddings of a model's queries and keys, recognised by what they compute.

Transformers' attention modules call a function of their own Python module, with queries, keys, cosines and sines as its
first arguments. Where its results are those of the native operator, the attention module's forward is copied with the
native function under that name. The Python module itself stays as it is.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.cpu_operators.forward import NativeForward
from gpu_worker.cpu_operators.norms import TOLERANCE
from gpu_worker.cpu_operators.operators import rotary

_ARGUMENTS = ["q", "k", "cos", "sin"]

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


def _with_native_rotations(forward: FunctionType, dtype: torch.dtype) -> FunctionType | None:
    natives: dict[str, Rotation] = {}
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, FunctionType) and list(inspect.signature(function).parameters)[:4] == _ARGUMENTS:
            native = _recognised(function, dtype)
            if native is not None:
                natives[name] = native
    if not natives:
        return None
    copied = FunctionType(
        forward.__code__,
        {**forward.__globals__, **natives},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _recognised(function: FunctionType, dtype: torch.dtype) -> Rotation | None:
    if not _is_equal(function, 16, 16, dtype):
        return None
    return _NativeRotation(function, rotates_parts=_is_equal(function, 24, 16, dtype))


def _is_equal(function: FunctionType, dim: int, rotated: int, dtype: torch.dtype) -> bool:
    """Whether the function rotates the first `rotated` of `dim` elements as the native operator does."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn((1, 5, heads, dim), generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn((1, 5, rotated), generator=generator).to(dtype) for _ in range(2))
    try:
        found = function(query, key, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):
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
