"""Attention by the C++ kernels: the layers that they cover, and calls for decode rows, prompt chunks, and K and V.

The kernels derive what a query sees from positions, and read pages through the page table, so they need no masks and no
other lists of pages; `native/decode.h` and `native/prefill.h` document the algorithms. Knows nothing of plans.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gpu_worker.arrays import Int64Array
from gpu_worker.attention.layers import AttentionKind
from gpu_worker.native.library import NativeLibrary

_Address = ctypes.c_void_p
_Int = ctypes.c_int64
# MOST_DIM of native/decode_prefetch.h.
_MOST_DIM = 1024
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Call(ctypes.Structure):
    """AttentionCall of native/attention.h."""

    _fields_ = (
        *((name, _Address) for name in ("query", "keys", "values", "sinks", "out", "table")),
        *((name, _Int) for name in ("table_stride", "query_token_stride", "query_head_stride", "pool_head_stride")),
        *((name, _Int) for name in ("num_kv_heads", "group", "key_dim", "value_dim", "head_dim", "page_size")),
        *((name, _Int) for name in ("window", "sink_tokens", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _DecodeCall(_Call):
    """DecodeCall of native/decode_pages.h."""

    _fields_ = (*((name, _Address) for name in ("lines", "positions", "scratch")), ("num_rows", _Int))


class _PrefillCall(_Call):
    """prefill::Call of native/prefill.h."""

    _fields_ = (
        *((name, _Address) for name in ("lines", "starts", "counts", "tokens")),
        *((name, _Int) for name in ("num_tiles", "most_queries")),
    )


class _Kernel:
    """A kernel for layers of one kind, in pools of one dtype."""

    # The function of the library, without the name of the dtype, and its argument.
    _function: ClassVar[str]
    _argument: ClassVar[type[_Call]]

    def __init__(
        self, library: NativeLibrary, kind: AttentionKind, table: Tensor, *, page_size: int, dtype: torch.dtype
    ) -> None:
        """table: the page table, int32 [lines, width], with pages in logical order; kept by reference."""
        assert table.dtype == torch.int32 and table.stride(1) == 1
        self._run = library.function(f"{self._function}_{_NAMES[dtype]}", self._argument)
        self.kind, self._table, self._dtype = kind, table, dtype
        # The tokens of the step's part.
        self._num_tokens = 0
        self._call: Any = self._argument(
            table=table.data_ptr(),
            table_stride=table.stride(0),
            num_kv_heads=kind.num_kv_heads,
            group=kind.group,
            key_dim=kind.key_dim,
            value_dim=kind.value_dim,
            head_dim=kind.head_dim,
            page_size=page_size,
            window=kind.pattern.window or 0,
            sink_tokens=kind.pattern.sink_tokens,
            scale=kind.scale,
            softcap=kind.softcap or 0,
        )

    def __call__(self, query_THD: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out_THD: Tensor) -> None:
        """As `InPlaceKernel`, for the tokens of the part in order."""
        assert query_THD.shape[0] == self._num_tokens and query_THD.dtype == self._dtype
        call, (token_stride, head_stride, last) = self._call, query_THD.stride()
        if last != 1:
            query_THD = query_THD.contiguous()
            token_stride, head_stride, _ = query_THD.stride()
        if sinks is not None:
            sinks = sinks.float().contiguous()
            call.sinks = sinks.data_ptr()
        call.query, call.query_token_stride, call.query_head_stride = query_THD.data_ptr(), token_stride, head_stride
        call.keys, call.values, call.pool_head_stride = key.data_ptr(), value.data_ptr(), key.stride(0)
        call.out = out_THD.data_ptr()
        self._run(call)


class DecodeKernel(_Kernel):
    """The kernel of decode rows, which are its tokens."""

    _function, _argument = "tandem_decode", _DecodeCall

    def __init__(
        self, library: NativeLibrary, kind: AttentionKind, table: Tensor, *, page_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(library, kind, table, page_size=page_size, dtype=dtype)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # Where calls find the scratch memory, which grows with the contexts; recorded calls find it there too.
        self._scratch_address = _Address()
        self._call.scratch = ctypes.addressof(self._scratch_address)
        self._rows: tuple[Tensor, ...] = ()
        self._scratch_bytes = library.functions.tandem_decode_scratch
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = [ctypes.POINTER(_DecodeCall)], _Int

    def set_rows(self, lines: Tensor, positions: Tensor) -> None:
        assert lines.dtype == positions.dtype == torch.int64 and lines.is_contiguous() and positions.is_contiguous()
        # Kept until the next step, because the kernel reads them.
        self._rows, self._num_tokens = (lines, positions), lines.shape[0]
        call = self._call
        call.lines, call.positions, call.num_rows = lines.data_ptr(), positions.data_ptr(), self._num_tokens
        call.threads = torch.get_num_threads()
        num_bytes = self._scratch_bytes(call)
        if num_bytes > self._scratch.shape[0]:
            self._scratch = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
            self._scratch_address.value = self._scratch.data_ptr()


@dataclass(frozen=True, slots=True)
class NativeDecode:
    """The decode kernels of a model's layers. Decode rows are the same in every layer of a step."""

    kernels: tuple[DecodeKernel, ...]
    kernel: ClassVar[Any] = DecodeKernel

    @staticmethod
    def covers(kind: AttentionKind, dtype: torch.dtype) -> bool:
        return dtype in _NAMES and kind.head_dim <= _MOST_DIM

    def update(self, lines: Tensor, positions: Tensor) -> None:
        """Sets the rows of a step: the line of the page table and the query's position of each, int64 [rows]."""
        for kernel in dict.fromkeys(self.kernels):
            kernel.set_rows(lines, positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The query tiles of a step's chunks; every array is int64 [tiles], contiguous."""

    # Lines of the page table.
    lines: Int64Array
    # The position of the first query, the number of queries, and the place of the first one among the chunks' tokens.
    starts: Int64Array
    counts: Int64Array
    tokens: Int64Array

    @classmethod
    def of(cls, lines: Tensor, q_positions: Tensor) -> "Tiles":
        """The tiles of a step that is not padded, so that its i-th query is its i-th token.

        lines: int64 [tiles]. q_positions: int64 [tiles * positions of a tile], -1 for padding.
        """
        positions = q_positions.numpy().reshape(lines.shape[0], -1)
        counts = np.count_nonzero(positions >= 0, axis=1)
        # Idle tiles are the last.
        num = int(np.count_nonzero(counts))
        counts = counts[:num]
        return cls(
            lines=lines.numpy()[:num],
            starts=positions[:num, 0].copy(),
            counts=counts,
            tokens=np.cumsum(counts) - counts,
        )


class PrefillKernel(_Kernel):
    """The kernel of prompt chunks."""

    _function, _argument = "tandem_prefill", _PrefillCall

    def set_tiles(self, tiles: Tiles) -> None:
        # Kept until the next step, because the kernel reads them.
        self._tiles = tiles
        self._num_tokens, call = int(tiles.counts.sum()), self._call
        call.lines, call.starts = tiles.lines.ctypes.data, tiles.starts.ctypes.data
        call.counts, call.tokens = tiles.counts.ctypes.data, tiles.tokens.ctypes.data
        call.num_tiles, call.most_queries = tiles.counts.size, int(tiles.counts.max())
        call.threads = torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class NativePrefill:
    """The prefill kernels of a model's layers. Chunks are the same in every layer of a step."""

    kernels: tuple[PrefillKernel, ...]
    kernel: ClassVar[Any] = PrefillKernel

    @staticmethod
    def covers(kind: AttentionKind, dtype: torch.dtype) -> bool:
        return dtype in _NAMES and kind.scale > 0

    def update(self, lines: Tensor, q_positions: Tensor) -> None:
        """Sets the chunks of a step; the arguments are those of `Tiles.of`."""
        tiles = Tiles.of(lines, q_positions)
        for kernel in dict.fromkeys(self.kernels):
            kernel.set_tiles(tiles)


class _WriteCall(ctypes.Structure):
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
        self._call = _WriteCall(element_bytes=dtype.itemsize)
        self._write = library.function("tandem_write_kv", _WriteCall)

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
