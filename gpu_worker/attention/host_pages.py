"""Pages of host memory, to which pages of the pool are swapped out.

Owns the host's tensor and the copies to and from it. All copies are enqueued on the compute stream, so that a save
reads a page before any later write, and a load finds the contents of every earlier save. Knows nothing of sequences.
"""

import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.attention.kv_cache import KvCache

# Bytes of the pages that are gathered from all layers on the device at once.
_PASSAGE_BYTES = 32 << 20


class HostPages:
    """A host page holds K and V of all layers one after another, so that a page is one copy."""

    def __init__(self, cache: KvCache, num_pages: int) -> None:
        self._cache = cache
        self.pages = _host_zeros(num_pages, cache.page_elements, cache.keys[0])
        page_bytes = cache.page_elements * self.pages.element_size()
        self._at_once = max(1, _PASSAGE_BYTES // page_bytes)

    def save(self, pages: Tensor, slots: NDArray[np.integer]) -> None:
        """Copies pages int64 [n] of the pool, on its device, to host pages [n], all different."""
        for start in range(0, slots.size, self._at_once):
            part = slots[start : start + self._at_once]
            passing = self._cache.gathered(pages[start : start + part.size])
            for first, end, slot in _runs(part):
                self.pages[slot : slot + end - first].copy_(passing[first:end], non_blocking=True)

    def load(self, pages: Tensor, slots: NDArray[np.integer]) -> None:
        """Copies host pages [n] to pages int64 [n] of the pool, all different."""
        for start in range(0, slots.size, self._at_once):
            part = slots[start : start + self._at_once]
            passing = self.pages.new_empty((part.size, self.pages.shape[1]), device=pages.device)
            for first, end, slot in _runs(part):
                passing[first:end].copy_(self.pages[slot : slot + end - first], non_blocking=True)
            self._cache.scatter(pages[start : start + part.size], passing)


def _runs(slots: NDArray[np.integer]) -> list[tuple[int, int, int]]:
    """Consecutive slots: (first index, end index, first slot) of each run, which is one copy."""
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    firsts, ends = [0, *edges.tolist()], [*edges.tolist(), slots.size]
    return [(first, end, int(slots[first])) for first, end in zip(firsts, ends, strict=True)]


def _host_zeros(num_pages: int, page_elements: int, like: Tensor) -> Tensor:
    """Zeros, page-locked for a GPU. Torch's own pinned memory is rounded up to a power of two, which may double it."""
    if not num_pages:
        return torch.zeros(0, page_elements, dtype=like.dtype)
    count = num_pages * page_elements
    memory = mmap.mmap(-1, count * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the mapping alive. Anonymous memory is zeroed.
    pages = torch.frombuffer(memory, dtype=like.dtype, count=count).view(num_pages, page_elements)
    if like.is_cuda:
        code = torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), count * like.element_size(), 0)
        if code != 0:
            raise ValueError(
                f"host_pool_bytes: {count * like.element_size()} bytes of host memory cannot be locked for the GPU "
                f"(CUDA error {int(code)}); set a smaller host_pool_bytes, or 0"
            )
    return pages
