"""Attention of prompt chunks by the C++ kernel: which layers it covers, and its calls.

The kernel derives what a query sees from positions, so it reads no masks and no lists of pages but the page table;
`native/prefill.h` documents the algorithm. Knows nothing of plans.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.arrays import Int64Array
from gpu_worker.attention.layers import AttentionKind, LayerMap
from gpu_worker.cpu_attention.layer import layer_arguments
from gpu_worker.native.library import NativeLibrary

_FUNCTIONS = {torch.float32: "tandem_prefill_float32", torch.bfloat16: "tandem_prefill_bfloat16"}
_Address = ctypes.c_void_p
_Int = ctypes.c_int64


class _Call(ctypes.Structure):
    """prefill::Call of native/prefill.h."""

    _fields_ = (
        *((name, _Address) for name in ("query", "keys", "values", "out", "sinks")),
        *((name, _Address) for name in ("table", "lines", "starts", "counts", "tokens")),
        *((name, _Int) for name in ("num_tiles", "table_width")),
        *((name, _Int) for name in ("query_token", "query_head", "out_token", "out_head", "kv_head")),
        *((name, _Int) for name in ("num_kv_heads", "group", "key_dim", "value_dim", "head_dim", "page_size")),
        *((name, _Int) for name in ("window", "sink_tokens", "most_queries", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


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


class NativePrefill:
    """The prefill kernels of a model's layers. Chunks are the same in every layer of a step."""

    def __init__(
        self, library: NativeLibrary, layers: LayerMap, table: Tensor, *, page_size: int, dtype: torch.dtype
    ) -> None:
        """table: the page table, int32 [lines, width], with pages in logical order; kept by reference."""
        own = {kind: PrefillKernel(library, kind, table, page_size=page_size, dtype=dtype) for kind in layers.kinds}
        self._own = tuple(own.values())
        # By layer.
        self.kernels = tuple(own[layer.kind] for layer in layers.layers)

    @staticmethod
    def covers(kind: AttentionKind, dtype: torch.dtype) -> bool:
        """Whether the kernel computes layers of this kind in pools of this dtype."""
        return dtype in _FUNCTIONS and kind.scale > 0

    def update(self, lines: Tensor, q_positions: Tensor) -> None:
        """Sets the chunks of a step; the arguments are those of `Tiles.of`."""
        tiles = Tiles.of(lines, q_positions)
        for kernel in self._own:
            kernel.set_tiles(tiles)


class PrefillKernel:
    """The kernel for layers of one kind."""

    def __init__(
        self, library: NativeLibrary, kind: AttentionKind, table: Tensor, *, page_size: int, dtype: torch.dtype
    ) -> None:
        self.kind, self._table, self._dtype = kind, table, dtype
        self._tiles: Tiles | None = None
        self._call = _Call(table_width=table.stride(0), **layer_arguments(kind, table, page_size))
        self._run = library.function(_FUNCTIONS[dtype], _Call)

    def set_tiles(self, tiles: Tiles) -> None:
        """Sets the tiles of a step."""
        # Kept until the next step, because the kernel reads them.
        self._tiles, call = tiles, self._call
        call.lines, call.starts = tiles.lines.ctypes.data, tiles.starts.ctypes.data
        call.counts, call.tokens = tiles.counts.ctypes.data, tiles.tokens.ctypes.data
        call.num_tiles, call.most_queries = tiles.counts.size, int(tiles.counts.max())
        call.threads = torch.get_num_threads()

    def __call__(self, query_THD: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out_THD: Tensor) -> None:
        """Writes outputs [T, H, value dimension] of the chunks' queries [T, H, key dimension]; key and value are the
        layer's pool [K, N, D]; sinks [H]."""
        assert query_THD.dtype == key.dtype == value.dtype == out_THD.dtype == self._dtype
        call = self._call
        if query_THD.stride(2) != 1:
            query_THD = query_THD.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
            call.sinks = sinks.data_ptr()
        call.query, (call.query_token, call.query_head, _) = query_THD.data_ptr(), query_THD.stride()
        call.keys, call.values, call.kv_head = key.data_ptr(), value.data_ptr(), key.stride(0)
        call.out, (call.out_token, call.out_head, _) = out_THD.data_ptr(), out_THD.stride()
        self._run(call)
