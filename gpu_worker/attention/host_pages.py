"""Pages of host memory, to which pages of the pool are swapped out.

Owns the host's tensor, the buffers through which pages pass, and the copies. The compute stream only moves pages
between pool and buffers, at the speed of device memory; copies over the bus run on a copy stream beside it. Work of one
stream runs in the order in which it was enqueued; only an event orders work of different streams. Invariants:

- Only the compute stream reads and writes the pool. So a save reads a page before any later write, and attention reads
  a page after its load.
- Only the copy stream reads and writes host pages. So a load finds the contents of every earlier save. A load that
  `fetch` starts early overtakes the saves of its own plan, which is why it takes only pages that these do not write.
- Both streams use a buffer: one fills it, then the other empties it. `filled` orders these two, and `emptied` orders
  the emptying before the next filling.
- Buffers are allocated once and live as long as this object, so the allocator never gives their memory to other work.

Knows nothing of sequences.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.attention.kv_cache import KvCache, huge_zeros
from tandem_contract.plural import numbered

# On a GPU two buffers for each direction: one is filled while the other is emptied, and the first pages of a plan do
# not wait for the bus. Fewer passages mean fewer launches, because a passage has one per tensor of the pool.
_GPU_BUFFERS, _GPU_BYTES = 2, 64 << 20
# On a CPU a copy ends before the next begins.
_CPU_BUFFERS, _CPU_BYTES = 1, 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """Buffers of one direction."""

    num_buffers: int
    # Pages that one buffer holds, all layers of each: one passage.
    pages_at_once: int

    @classmethod
    def of(cls, page_bytes: int, host_pages: int, *, on_cpu: bool) -> "Passing":
        """Returns buffers of at least a page and at most the host's pages. page_bytes: K and V of all layers."""
        num_buffers, num_bytes = (_CPU_BUFFERS, _CPU_BYTES) if on_cpu else (_GPU_BUFFERS, _GPU_BYTES)
        return cls(num_buffers=num_buffers, pages_at_once=min(max(1, num_bytes // page_bytes), host_pages))

    def num_bytes(self, page_bytes: int) -> int:
        """Bytes of the buffers of both directions."""
        return 2 * self.num_buffers * self.pages_at_once * page_bytes


# A wait before the first `record` does nothing.
Event = torch.cuda.Event | torch.cpu.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The compute stream, which is current unless `copying` is entered, and the copy stream."""

    # A new event.
    event: Callable[[], Event]
    # Makes the copy stream current.
    copying: Callable[[], AbstractContextManager[object]]


def streams_of(device: torch.device) -> Streams:
    """Returns the two streams of a GPU. On a CPU work has ended when its call returns, so there is nothing to order."""
    if device.type != "cuda":
        return Streams(event=torch.cpu.Event, copying=nullcontext)
    # Torch's streams do not synchronise with the default stream, so only events order the two.
    copy = torch.cuda.Stream(device)
    return Streams(event=torch.cuda.Event, copying=lambda: torch.cuda.stream(copy))


class HostPages:
    """A host page holds K and V of all layers one after another, so that a page is one copy."""

    def __init__(
        self,
        cache: KvCache,
        num_pages: int,
        *,
        streams: Streams | None = None,
        passing: Passing | None = None,
    ) -> None:
        """streams, passing: by default those of the cache's device; tests pass others."""
        self._cache = cache
        self.pages = _host_zeros(num_pages, cache.page_elements, cache.keys[0])
        self._saving: list[_Buffer] = []
        self._loading: list[_Buffer] = []
        if not num_pages:
            return
        device, page_bytes = cache.keys[0].device, cache.page_elements * self.pages.element_size()
        self._streams = streams or streams_of(device)
        passing = passing or Passing.of(page_bytes, num_pages, on_cpu=device.type == "cpu")
        self._at_once = passing.pages_at_once
        for buffers in (self._saving, self._loading):
            for _ in range(passing.num_buffers):
                contents = cache.keys[0].new_empty(self._at_once, cache.page_elements)
                buffers.append(_Buffer(contents=contents, filled=self._streams.event(), emptied=self._streams.event()))

    def save(self, pages: Tensor, slots: NDArray[np.integer]) -> None:
        """Copies pages int64 [n] of the pool, on its device, to host pages [n], all different."""
        for i, part in enumerate(self._passages(slots.size)):
            buffer = self._saving[i % len(self._saving)]
            passing = buffer.contents[: part.stop - part.start]
            buffer.emptied.wait()
            self._cache.gather(pages[part], passing)
            buffer.filled.record()
            with self._streams.copying():
                buffer.filled.wait()
                for first, end, slot in _runs(slots[part]):
                    self.pages[slot : slot + end - first].copy_(passing[first:end], non_blocking=True)
                buffer.emptied.record()

    def fetch(self, slots: NDArray[np.integer], saved: NDArray[np.integer]) -> int:
        """Starts the copies of the first of the host pages `slots`, and returns the number of passages that it started.

        The device computes meanwhile. saved: host pages that `save` writes between this call and `load`.
        """
        parts = self._passages(slots.size)[: len(self._loading)]
        for i, part in enumerate(parts):
            if np.isin(slots[part], saved).any():
                return i
            self._fill(self._loading[i], slots[part])
        return len(parts)

    def load(self, pages: Tensor, slots: NDArray[np.integer], num_fetched: int = 0) -> None:
        """Copies host pages [n] to pages int64 [n] of the pool, all different. num_fetched: the result of `fetch`."""
        for i, part in enumerate(self._passages(slots.size)):
            buffer = self._loading[i % len(self._loading)]
            if i >= num_fetched:
                self._fill(buffer, slots[part])
            buffer.filled.wait()
            self._cache.scatter(pages[part], buffer.contents[: part.stop - part.start])
            buffer.emptied.record()

    def _fill(self, buffer: "_Buffer", slots: NDArray[np.integer]) -> None:
        with self._streams.copying():
            buffer.emptied.wait()
            for first, end, slot in _runs(slots):
                buffer.contents[first:end].copy_(self.pages[slot : slot + end - first], non_blocking=True)
            buffer.filled.record()

    def _passages(self, count: int) -> list[slice]:
        return [slice(first, min(first + self._at_once, count)) for first in range(0, count, self._at_once)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Room for the pages of one passage, on the device."""

    contents: Tensor
    filled: Event
    emptied: Event


def _runs(slots: NDArray[np.integer]) -> list[tuple[int, int, int]]:
    """Consecutive slots: (first index, end index, first slot) of each run, which is one copy."""
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    firsts, ends = [0, *edges.tolist()], [*edges.tolist(), slots.size]
    return [(first, end, int(slots[first])) for first, end in zip(firsts, ends, strict=True)]


def _host_zeros(num_pages: int, page_elements: int, like: Tensor) -> Tensor:
    """Zeros, page-locked for a GPU. Torch's own pinned memory is rounded up to a power of two, which may double it."""
    if not num_pages:
        return torch.zeros(0, page_elements, dtype=like.dtype)
    # Locking memory takes time for each page of the system, and huge ones are 512 times fewer.
    pages = huge_zeros((num_pages, page_elements), like.dtype)
    if like.is_cuda:
        library: Any = torch.cuda.cudart()
        code = library.cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)
        if code != 0:
            raise ValueError(
                f"host_pool_bytes: {numbered(pages.nbytes, 'byte')} of host memory cannot be locked for the GPU "
                f"(CUDA error {int(code)}); set a smaller host_pool_bytes, or 0"
            )
        # Otherwise later memory at these addresses could not be locked.
        weakref.finalize(pages, library.cudaHostUnregister, pages.data_ptr()).atexit = False
    return pages
