"""The small operators of `native/operators.h` as functions of tensors.

Owns their declarations, and the layouts that they read: float32 or bfloat16 on a CPU, elements of the last dimension
side by side. For other tensors they return None, and the caller computes with torch. Knows nothing of models.
"""

from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from gpu_worker.native.library import NativeFunction, native_library

_TYPES = (torch.float32, torch.bfloat16)
_ADDRESS, _SIZE, _INT = c_void_p, c_int64, c_int32
_SIGNATURES = {
    "tandem_rms_norm": (*[_ADDRESS] * 3, *[_SIZE] * 5, c_float, _INT, _INT),
    "tandem_rotary": (*[_ADDRESS] * 4, *[_SIZE] * 7, _INT, _INT),
    "tandem_gated": (*[_ADDRESS] * 3, *[_SIZE] * 4, _INT, _INT, _INT),
    "tandem_add": (*[_ADDRESS] * 3, _SIZE, _INT, _INT),
}


class Activation(IntEnum):
    """The activations of `gated`; the numbers are those of operators.h."""

    SILU = 0
    GELU_TANH = 1


@cache
def _function(name: str) -> NativeFunction:
    library = native_library()
    assert library is not None, "the kernels are not built"
    return library.function(name, *_SIGNATURES[name])


def is_covered(*tensors: Tensor) -> bool:
    """Whether the operators read these tensors: of one type that they know, in memory of the CPU."""
    dtype = tensors[0].dtype
    return dtype in _TYPES and all(
        tensor.is_cpu and tensor.dtype is dtype and tensor.stride(-1) == 1 for tensor in tensors
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension; x [..., n], weight float32 [n], contiguous."""
    if not is_covered(x):
        return None
    shape = x.shape
    columns = shape[-1]
    if x.is_contiguous():
        outer, inner, outer_stride, inner_stride = 1, x.numel() // columns, 0, columns
    elif x.dim() == 4 and shape[0] == 1:
        (_, outer, inner, _), (_, outer_stride, inner_stride, _) = shape, x.stride()
    elif x.dim() == 3 and shape[0] == 1:
        outer, inner, outer_stride, inner_stride = 1, shape[1], 0, x.stride(1)
    else:
        return None
    # A tuple takes half the time of a torch.Size.
    out = x.new_empty((*shape,))
    if outer * inner:
        _function("tandem_rms_norm")(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, columns, outer_stride, inner_stride, epsilon,
            x.dtype is torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
    return out


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor | None:
    """Rotary embedding of x [1, H, T, D] with cosine and sine [1, T, R]: elements i and i + R/2 of the first R are
    rotated. The result has shape [1, H, T, D] and the memory of [1, T, H, D]."""
    if not is_covered(x, cosine, sine) or x.dim() != 4 or cosine.dim() != 3:
        return None
    (batch, heads, tokens, dim), rotated = x.shape, cosine.shape[2]
    own_table = cosine.shape == sine.shape == (1, tokens, rotated) and cosine.stride() == sine.stride()
    if batch != 1 or not own_table or rotated > dim or rotated % 2:
        return None
    out = x.new_empty((1, tokens, heads, dim))
    if tokens:
        _function("tandem_rotary")(
            x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), out.data_ptr(), tokens, heads, dim, rotated // 2,
            x.stride(2), x.stride(1), cosine.stride(1), x.dtype is torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
    return out.transpose(1, 2)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor | None:
    """activation(gate) * up; both [..., n] with rows at equal distances, as parts of one product have."""
    shape = gate.shape
    if not is_covered(gate, up) or up.shape != shape or not (_has_rows(gate) and _has_rows(up)):
        return None
    out = gate.new_empty((*shape,))
    columns = shape[-1]
    if out.numel():
        gate_stride, up_stride = (x.stride(-2) if x.dim() > 1 else columns for x in (gate, up))
        _function("tandem_gated")(
            gate.data_ptr(), up.data_ptr(), out.data_ptr(), out.numel() // columns, columns, gate_stride, up_stride,
            activation, gate.dtype is torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
    return out


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out = x + y: contiguous tensors of one shape and of a type that `is_covered`."""
    _function("tandem_add")(
        x.data_ptr(), y.data_ptr(), out.data_ptr(), out.numel(), x.dtype is torch.bfloat16, torch.get_num_threads()
    )


def _has_rows(x: Tensor) -> bool:
    return x.dim() <= 2 or (x.dim() == 3 and x.shape[0] == 1) or x.is_contiguous()
