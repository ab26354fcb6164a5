"""Keys and values of a step's tokens, written to the paged pool by the C++ kernel."""

import ctypes

import torch
from torch import Tensor

from gpu_worker.native.library import NativeLibrary

_Address = ctypes.c_void_p
_Int = ctypes.c_int64


class _Call(ctypes.Structure):
    """KvWrite of native/kv_write.h."""

    _fields_ = (
        *((name, _Address) for name in ("key", "value", "keys", "values", "slots")),
        *((name, _Int) for name in ("key_head_stride", "key_token_stride", "value_head_stride", "value_token_stride")),
        *((name, _Int) for name in ("pool_head_stride", "head_dim", "key_dim", "value_dim", "num_kv_heads")),
        *((name, _Int) for name in ("num_tokens", "element_bytes")),
    )


class KvWriter:
    """Writes keys and values in place of indexed assignment, which takes 30 us of a decode step's layer."""

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        self._call = _Call(element_bytes=dtype.itemsize)
        self._write = library.function("tandem_write_kv", _Call)

    @classmethod
    def of(cls, library: NativeLibrary | None, dtype: torch.dtype) -> "KvWriter | None":
        """The writer for a pool of this dtype; None without a library."""
        return None if library is None else cls(library, dtype)

    def __call__(self, key_KTD: Tensor, value_KTD: Tensor, keys: Tensor, values: Tensor, kv_slots: Tensor) -> None:
        """Writes [K, T, own dimension] to token slots kv_slots int64 [T] of keys and values [K, N, D]."""
        if key_KTD.stride(2) != 1:
            key_KTD = key_KTD.contiguous()
        if value_KTD.stride(2) != 1:
            value_KTD = value_KTD.contiguous()
        call = self._call
        call.key_head_stride, call.key_token_stride, _ = key_KTD.stride()
        call.value_head_stride, call.value_token_stride, _ = value_KTD.stride()
        call.num_kv_heads, call.num_tokens, call.key_dim = key_KTD.shape
        call.value_dim, call.pool_head_stride, call.head_dim = value_KTD.shape[2], keys.stride(0), keys.stride(1)
        call.key, call.value, call.slots = key_KTD.data_ptr(), value_KTD.data_ptr(), kv_slots.data_ptr()
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        self._write(call)
