"""The paged pool: K and V of every layer.

Owns the tensors and their shape; `paged.py` writes new keys and values. K and V are separate per layer and
head-major. A token slot is page times page size plus offset. On a GPU each tensor must have fewer than 2^31 elements,
as `memory/sizing.py` ensures, because the decode kernel does not compile for more. Knows nothing of sequences.
"""

import math
import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.attention.layers import AttentionKind, LayerMap

_HUGE_PAGE_BYTES = 2 << 20


def tensor_shape(kind: AttentionKind, *, num_pages: int, page_size: int) -> tuple[int, int, int]:
    """(KV heads, tokens, head dimension) of a layer's K, and of its V; with learned sinks they have one more page."""
    return kind.num_kv_heads, (num_pages + kind.pattern.has_learned_sinks) * page_size, kind.head_dim


class PoolMemory(Protocol):
    """Memory for the tensors of a pool that is not this process's own."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def zero(self) -> None: ...


class KvCache:
    """Starts zeroed: a masked score gives probability 0, and 0 times a stale NaN would be NaN.

    Each layer has heads of its kind's size, and with learned sinks one more page (`View.num_learned_sink_pages`).
    """

    def __init__(
        self,
        layers: LayerMap,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: PoolMemory | None = None,
    ) -> None:
        """memory: where the tensors are; by default in memory of this process."""
        self.page_size = page_size
        self._memory = memory
        zeros = _zeros if memory is None else memory.zeros
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for kind in (layer.kind for layer in layers.layers):
            shape = tensor_shape(kind, num_pages=num_pages, page_size=page_size)
            # The operator writes the model's own dimensions; the padding behind them stays zero.
            self.keys.append(zeros(shape, dtype, device))
            self.values.append(zeros(shape, dtype, device))

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return (*self.keys, *self.values)

    def zero(self) -> None:
        if self._memory is not None:
            self._memory.zero()
            return
        for pool in self.pools:
            pool.zero_()

    def zero_pages(self, pages: Tensor) -> None:
        """Zeroes pages int64 [n] in every layer."""
        for pool in self._by_page():
            pool[:, pages] = 0

    def copy_pages(self, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Copies the first counts[i] tokens of page sources[i] to page targets[i], in every layer; all int64 [n].

        The rest of a target becomes zero: values of its previous owner may be NaN, which masking does not remove.
        """
        is_rest = torch.arange(self.page_size, device=counts.device) >= counts[:, None]
        for pool in self._by_page():
            pages = pool[:, sources]
            pool[:, targets] = pages.masked_fill_(is_rest[:, :, None], 0)

    @property
    def page_elements(self) -> int:
        """Elements of one page, K and V of all layers."""
        return sum(pool.shape[0] * self.page_size * pool.shape[2] for pool in self.pools)

    def gather(self, pages: Tensor, out: Tensor) -> None:
        """Copies the contents of pages int64 [n] to `out` [n, page_elements], K of every layer and then V."""
        for part, of_pages in self._parts(out):
            torch.index_select(of_pages, 0, pages, out=part)

    def scatter(self, pages: Tensor, contents: Tensor) -> None:
        """Writes contents [n, page_elements], as `gather` leaves them, to pages int64 [n]."""
        for part, of_pages in self._parts(contents):
            of_pages[pages] = part

    def _by_page(self) -> Iterator[Tensor]:
        """Each pool as [heads, pages, page size, head dimension]."""
        for pool in self.pools:
            heads, _, head_dim = pool.shape
            yield pool.view(heads, -1, self.page_size, head_dim)

    def _parts(self, contents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each pool's part of `contents`, and the pool with its pages as the first dimension."""
        begin = 0
        for pool in self._by_page():
            heads, _, _, head_dim = pool.shape
            size = heads * self.page_size * head_dim
            yield contents[:, begin : begin + size].view(-1, heads, self.page_size, head_dim), pool.transpose(0, 1)
            begin += size


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on Linux CPUs in huge pages, because decode, which reads K and V by page and head, gains 15 to 20 %."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_zeros(shape, dtype)


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory, in huge pages of the system where it has them."""
    num_items = math.prod(shape)
    num_bytes = -(-num_items * dtype.itemsize // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses the advice.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive. Anonymous memory is zeroed.
    return torch.frombuffer(memory, dtype=dtype, count=num_items).view(shape)
