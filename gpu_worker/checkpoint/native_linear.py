"""Linear layers by the C++ kernel of `native/linear.h`, and the layout of their weights.

Owns the declaration of the kernel's functions, the packing and its inverse. Knows nothing of modules.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gpu_worker.native.library import NativeFunction, NativeLibrary, native_library

_WORD_BYTES = 4
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernel:
    """y = x W^T + b for one dtype.

    W is packed as [panels, words, panel, elements per word]: panels of its rows, words along the input features.
    """

    # x, packed W, b or None, y (addresses); rows, input features, output features, threads.
    function: NativeFunction
    panel: int
    dtype: torch.dtype

    @property
    def per_word(self) -> int:
        """Elements in a word of 32 bits."""
        return _WORD_BYTES // self.dtype.itemsize

    def packed_bytes(self, weight: Tensor) -> int:
        """Bytes of the packed weight, with its padding."""
        num_panels, num_words = -(-weight.shape[0] // self.panel), -(-weight.shape[1] // self.per_word)
        return num_panels * num_words * self.panel * _WORD_BYTES

    def pack(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """`weight` [output features, input features] packed, in the memory of the flat tensor `out` if given."""
        rows, columns = weight.shape
        num_panels, num_words = -(-rows // self.panel), -(-columns // self.per_word)
        shape = num_panels, num_words, self.panel, self.per_word
        packed = weight.new_empty(shape) if out is None else out.view(shape)
        if rows == num_panels * self.panel and columns == num_words * self.per_word:
            packed.copy_(weight.view(num_panels, self.panel, num_words, self.per_word).transpose(1, 2))
        else:
            padded = weight.new_zeros(num_panels * self.panel, num_words * self.per_word)
            padded[:rows, :columns] = weight
            packed.copy_(padded.view(num_panels, self.panel, num_words, self.per_word).transpose(1, 2))
        return packed

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """The weight [out_features, in_features] again."""
        num_panels, num_words, panel, per_word = packed.shape
        whole = packed.transpose(1, 2).reshape(num_panels * panel, num_words * per_word)
        return whole[:out_features, :in_features].contiguous()

    def pack_bias(self, bias: Tensor) -> Tensor:
        """`bias` in float32, padded to panels."""
        packed = torch.zeros(-(-bias.shape[0] // self.panel) * self.panel)
        packed[: bias.shape[0]] = bias
        return packed

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x W^T + b [..., out_features] for x [..., in_features] of this dtype. Raises ValueError.

        The result of a row depends neither on the other rows nor on the number of threads.
        """
        *leading, in_features = x.shape
        if x.dtype is not self.dtype or packed.shape[1] != -(-in_features // self.per_word):
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, the layer takes {self.dtype} {list(packed.shape)}")
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*leading, out_features))
        self.function(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.numel() // out_features,
            in_features,
            out_features,
            torch.get_num_threads(),
        )
        return y


@cache
def linear_kernel(dtype: torch.dtype) -> LinearKernel | None:
    """The kernel of this machine for a dtype; None if there is none."""
    library = native_library()
    return None if library is None else kernel_of(library, dtype)


def kernel_of(library: NativeLibrary, dtype: torch.dtype) -> LinearKernel | None:
    """The kernel of a library for a dtype; None if the library has none."""
    name = f"tandem_linear_{str(dtype).removeprefix('torch.')}"
    if not hasattr(library.functions, name):
        return None
    panel = library.functions.tandem_linear_panel
    panel.restype = _SIZE
    return LinearKernel(
        function=library.function(name, *[_ADDRESS] * 4, *[_SIZE] * 3, ctypes.c_int32), panel=panel(), dtype=dtype
    )
