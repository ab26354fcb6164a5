"""Decode attention by the C++ kernel: which layers it covers, and its calls.

Reads pages through the page table; `native/decode.h` documents the algorithm. Knows nothing of plans.
"""

import ctypes

import torch
from torch import Tensor

from gpu_worker.attention.layers import AttentionKind, LayerMap
from gpu_worker.cpu_attention.layer import layer_arguments
from gpu_worker.native.library import NativeLibrary

_FUNCTIONS = {torch.float32: "tandem_decode_float32", torch.bfloat16: "tandem_decode_bfloat16"}
# MOST_DIM of native/decode_prefetch.h.
_MOST_DIM = 1024
_Address = ctypes.c_void_p
_Int = ctypes.c_int64


class _Call(ctypes.Structure):
    """DecodeCall of native/decode_pages.h."""

    _fields_ = (
        *((name, _Address) for name in ("query", "keys", "values", "sinks", "out")),
        *((name, _Int) for name in ("query_row_stride", "query_head_stride", "pool_head_stride")),
        *((name, _Address) for name in ("table", "lines", "positions", "scratch")),
        *((name, _Int) for name in ("table_stride", "num_rows", "num_kv_heads", "group", "key_dim", "value_dim")),
        *((name, _Int) for name in ("head_dim", "page_size", "window", "sink_tokens", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class NativeDecode:
    """The decode kernels of a model's layers. Decode rows are the same in every layer of a step."""

    def __init__(
        self, library: NativeLibrary, layers: LayerMap, table: Tensor, *, page_size: int, dtype: torch.dtype
    ) -> None:
        """table: the page table, int32 [lines, width], with pages in logical order; kept by reference."""
        own = {kind: DecodeKernel(library, kind, table, page_size=page_size, dtype=dtype) for kind in layers.kinds}
        self._own = tuple(own.values())
        # By layer.
        self.kernels = tuple(own[layer.kind] for layer in layers.layers)

    @staticmethod
    def covers(kind: AttentionKind, dtype: torch.dtype) -> bool:
        """Whether the kernel computes layers of this kind in pools of this dtype."""
        return dtype in _FUNCTIONS and kind.head_dim <= _MOST_DIM

    def update(self, lines: Tensor, positions: Tensor) -> None:
        """Sets the rows of a step: the line of the page table and the query's position of each, int64 [rows]."""
        for kernel in self._own:
            kernel.set_rows(lines, positions)


class DecodeKernel:
    """The kernel for layers of one kind."""

    def __init__(
        self, library: NativeLibrary, kind: AttentionKind, table: Tensor, *, page_size: int, dtype: torch.dtype
    ) -> None:
        self.kind, self._table, self._dtype = kind, table, dtype
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # Where calls find the scratch memory, which grows with the contexts; recorded calls find it there too.
        self._scratch_address = _Address()
        self._rows: tuple[Tensor, ...] = ()
        self._call = _Call(
            table_stride=table.stride(0),
            scratch=ctypes.addressof(self._scratch_address),
            **layer_arguments(kind, table, page_size),
        )
        self._run = library.function(_FUNCTIONS[dtype], _Call)
        self._scratch_bytes = library.functions.tandem_decode_scratch
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = [ctypes.POINTER(_Call)], _Int

    def set_rows(self, lines: Tensor, positions: Tensor) -> None:
        """Sets the rows of a step, as `NativeDecode.update`."""
        assert lines.dtype == positions.dtype == torch.int64 and lines.is_contiguous() and positions.is_contiguous()
        # Kept until the next step, because the kernel reads them.
        self._rows = lines, positions
        call = self._call
        call.lines, call.positions, call.num_rows = lines.data_ptr(), positions.data_ptr(), lines.shape[0]
        call.threads = torch.get_num_threads()
        num_bytes = self._scratch_bytes(call)
        if num_bytes > self._scratch.shape[0]:
            self._scratch = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
            self._scratch_address.value = self._scratch.data_ptr()

    def __call__(self, query_THD: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out_THD: Tensor) -> None:
        """Writes outputs [T, H, value dimension], contiguous, of queries [T, H, key dimension], one for each row; key
        and value are the layer's pool [K, N, D]; sinks [H]."""
        call = self._call
        assert query_THD.shape[0] == call.num_rows and query_THD.dtype == self._dtype
        row_stride, head_stride, last = query_THD.stride()
        if last != 1:
            query_THD = query_THD.contiguous()
            row_stride, head_stride, _ = query_THD.stride()
        if sinks is not None:
            sinks = sinks.float().contiguous()
            call.sinks = sinks.data_ptr()
        call.query, call.query_row_stride, call.query_head_stride = query_THD.data_ptr(), row_stride, head_stride
        call.keys, call.values, call.pool_head_stride = key.data_ptr(), value.data_ptr(), key.stride(0)
        call.out = out_THD.data_ptr()
        self._run(call)
