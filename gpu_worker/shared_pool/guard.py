"""Keeps track of which pages of a shared pool are whole, and checks those of a dead worker before they are read.

Before a step writes to a page, the page is marked as not whole. After the step, each page that it filled gets its
checksum and the step's number. A worker that takes the pool over compares the checksum of a page when a row first
starts with it, so that only pages that are used are read, each once.

The checksum of a page is a weighted sum of its 64-bit words, modulo 2^64. Each word of K (or V) of a layer has an odd
weight that depends on its place in a head, so that moved values change the sum as well as changed ones; heads are not
distinguished. K and V of the layers, in order, have odd weights, too. It finds damage, not malice, at the cost of
reading the page once. In host memory the kernels of the machine compute it if they are built (`native/page_sum.h`),
otherwise torch does; on a device it takes a few launches and no wait. The sums are equal, so that another worker can
check them: products and sums of int64 wrap modulo 2^64 on every device.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.geometry import PAGES_AT_ONCE
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.native.library import NativeLibrary, native_library
from gpu_worker.shared_pool.cuda_region import bytes_at
from gpu_worker.shared_pool.messages import PageDamaged
from gpu_worker.shared_pool.region import Header
from gpu_worker.wire.frames import Plan

# The odd increment of splitmix64.
_STEP = 0x9E3779B97F4A7C15
_LAST_64_BITS = (1 << 64) - 1
# Two plans in flight, and one more.
_NUM_RESULTS = 3


class _PageWords(ctypes.Structure):
    """PageWords of native/page_sum.h."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("of_words", ctypes.c_void_p),
        ("of_pools", ctypes.c_void_p),
        ("num_pools", ctypes.c_int64),
        ("pool_distance", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_distance", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
    )


class KernelChecksums:
    """In host memory, by the kernels of the machine."""

    def __init__(self, words: Sequence[Tensor], library: NativeLibrary) -> None:
        self._sum: Any = library.functions.tandem_page_sum
        self._sum.argtypes, self._sum.restype = (ctypes.POINTER(_PageWords), ctypes.c_int64), ctypes.c_uint64
        # The calls have their addresses.
        weights = list(_weights(words))
        self._kept = words, weights
        self.calls: list[_PageWords] = []
        for group, (of_pools, of_words) in zip(words, weights, strict=True):
            num_pools, num_heads, _, num_words = group.shape
            addresses = group.data_ptr(), of_words.ctypes.data, of_pools.ctypes.data
            self.calls.append(_PageWords(*addresses, num_pools, group.stride(0), num_heads, group.stride(1), num_words))

    def begin(self, pages: Sequence[int]) -> Callable[[], list[int]]:
        """Enqueues the checksums of the pages' present content. The function returns them when the work has ended."""
        sums = self.of(pages)
        return lambda: sums

    def of(self, pages: Sequence[int]) -> list[int]:
        """The same, after a wait for the device."""
        return [sum(self._sum(call, page) for call in self.calls) & _LAST_64_BITS for page in pages]


class TorchChecksums:
    """On any device. At most `_NUM_RESULTS - 1` results may be unread."""

    def __init__(self, words: Sequence[Tensor]) -> None:
        self._device, num_pages = words[0].device, min(group.shape[2] for group in words)
        self._words, weights = words, [np.outer(*of_group).view(np.int64) for of_group in _weights(words)]
        self._weights = [torch.from_numpy(of_group).to(self._device) for of_group in weights]
        zeros: dict[str, Any] = {"dtype": torch.int64, "device": self._device}
        self._sums = [torch.zeros((PAGES_AT_ONCE, *of_group.shape), **zeros) for of_group in weights]
        self._parts, self._found = torch.zeros((len(words), num_pages), **zeros), torch.zeros(num_pages, **zeros)
        is_gpu = self._device.type == "cuda"
        self._results = [torch.zeros(num_pages, dtype=torch.int64, pin_memory=is_gpu) for _ in range(_NUM_RESULTS)]
        self._next = 0
        # Loads the kernels.
        self.begin([0])

    @torch.inference_mode()
    def begin(self, pages: Sequence[int]) -> Callable[[], list[int]]:
        count, result = len(pages), self._results[self._next]
        self._next = (self._next + 1) % len(self._results)
        for at in range(0, count, PAGES_AT_ONCE):
            some = pages[at : at + PAGES_AT_ONCE]
            for number, (words, weights, sums) in enumerate(zip(self._words, self._weights, self._sums, strict=True)):
                for place, page in enumerate(some):
                    torch.sum(words[:, :, page], dim=1, out=sums[place])
                weighted = sums[: len(some)].mul_(weights)
                torch.sum(weighted, dim=(1, 2), out=self._parts[number, at : at + len(some)])
        torch.sum(self._parts[:, :count], dim=0, out=self._found[:count])
        result[:count].copy_(self._found[:count], non_blocking=True)
        return lambda: result[:count].numpy().view(np.uint64).tolist()

    def of(self, pages: Sequence[int]) -> list[int]:
        read = self.begin(pages)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return read()


PageChecksums = KernelChecksums | TorchChecksums


def checksums_of(words: Sequence[Tensor]) -> PageChecksums:
    """words: of each group of pools, as `words_of` returns them."""
    library = native_library() if words[0].is_cpu else None
    return TorchChecksums(words) if library is None else KernelChecksums(words, library)


def odd(count: int) -> NDArray[np.uint64]:
    """`count` odd weights, each different."""
    return (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)) | np.uint64(1)


def words_of(pools: Sequence[Tensor], page_size: int) -> list[Tensor]:
    """The pools [heads, tokens, dimension] as the words of their pages, int64 [pools, heads, pages, words of a page].

    Pools of one shape at equal distances in memory are one group, so that one call or launch reads them all.
    """
    groups: list[list[Tensor]] = []
    for pool in pools:
        if groups and _continues(groups[-1], pool):
            groups[-1].append(pool)
        else:
            groups.append([pool])
    return [_group(group, page_size) for group in groups]


def _continues(group: Sequence[Tensor], pool: Tensor) -> bool:
    distances = [after.data_ptr() - before.data_ptr() for before, after in pairwise([*group[-2:], pool])]
    return pool.shape == group[0].shape and min(distances) > 0 and len(set(distances)) == 1


def _group(pools: Sequence[Tensor], page_size: int) -> Tensor:
    first = pools[0]
    distance = pools[1].data_ptr() - first.data_ptr() if len(pools) > 1 else 0
    whole = bytes_at(first.data_ptr(), distance * (len(pools) - 1) + first.nbytes, first.device).view(torch.int64)
    num_pages, num_bytes = first.shape[1] // page_size, page_size * first.shape[2] * first.element_size()
    assert num_bytes % 8 == 0, "a page has at least 16 tokens"
    num_words = num_bytes // 8
    return whole.as_strided(
        (len(pools), first.shape[0], num_pages, num_words), (distance // 8, num_pages * num_words, num_words, 1)
    )


def _weights(words: Sequence[Tensor]) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Returns for each group the weights of its pools, and those of the words of a page."""
    num_before = 0
    of_pools = odd(sum(group.shape[0] for group in words))
    for group in words:
        yield of_pools[num_before : num_before + group.shape[0]], odd(group.shape[3])
        num_before += group.shape[0]


class PageGuard:
    """`checksums` are set before the first step."""

    checksums: PageChecksums

    def __init__(self, header: Header, num_pages: int) -> None:
        self._header = header
        # Pages that a dead worker wrote and that were not checked yet.
        self._is_unchecked = bytearray(num_pages)
        self._may_be_unchecked = False
        self._filled: list[int] = []
        # For each step in flight that fills pages: those that no later plan has begun to write.
        self._in_flight: list[set[int]] = []
        self._generation = 0

    def begin_generation(self, generation: int) -> None:
        self._generation = generation
        self._header.begin_generation(generation)

    def restart(self, *, is_unchecked: bool) -> None:
        """The pool is now that of a dead worker, and unchecked, or zeroed. What steps in flight filled is gone."""
        self._is_unchecked = bytearray(bytes([is_unchecked]) * len(self._is_unchecked))
        self._may_be_unchecked = is_unchecked
        for pages in self._in_flight:
            pages.clear()
        self._in_flight = []
        self._header.begin_generation(self._generation)

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """Checks the pages that the plan's rows start with, and marks those that the step writes.

        `tables` have the plan's rows and pages, and positions before the step. Waits for the device only for pages of a
        dead worker that were not checked. Raises PageDamaged.
        """
        # Plans of generation 0 are the worker's own.
        self._filled = _pages_filled(plan, tables) if self._generation else []
        if not (plan.append_pages.size or plan.started is not None or plan.page_orders):
            return
        begun = pages_begun(plan, tables.geometry.page_size)
        if self._may_be_unchecked:
            pages = sorted(pages_read(plan, tables.geometry.page_size) - {0, *begun})
            self._check([page for page in pages if self._is_unchecked[page]])
        # Few pages: loops take less time than the arrays' own operations.
        filled_by, is_unchecked = self._header.filled_by, self._is_unchecked
        for page in begun:
            filled_by[page] = is_unchecked[page] = 0
        for filled in self._in_flight:
            filled.difference_update(begun)

    def end_step(self, step: int) -> Callable[[], None] | None:
        """Begins the checksums of the pages that the last step fills; the step has ended, or is enqueued.

        The function, called when this work has ended, records them. None if no page was filled.
        """
        if not self._filled:
            return None
        pages, self._filled = self._filled, []
        read, whole = self.checksums.begin(pages), set(pages)
        self._in_flight.append(whole)

        def record() -> None:
            self._in_flight = [other for other in self._in_flight if other is not whole]
            for page, checksum in zip(pages, read(), strict=True):
                if page in whole:
                    self._header.checksums[page] = checksum
                    # Written last: until then the page is not whole.
                    self._header.filled_by[page] = step

        return record

    def _check(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._header.filled_by[page]:
                raise PageDamaged(f"page {page} of the pool that was taken over is not whole")
        for page, checksum in zip(pages, self.checksums.of(pages), strict=True):
            if checksum != int(self._header.checksums[page]):
                step = int(self._header.filled_by[page])
                raise PageDamaged(
                    f"page {page} of the pool that was taken over has changed since step {step} filled it"
                )
            self._is_unchecked[page] = 0


def pages_read(plan: Plan, page_size: int) -> set[int]:
    """Pages that rows of the plan start with, and that are copied or saved. Page 0 stands for one that is not read."""
    pages: set[int] = {*plan.page_orders.copied_from.tolist(), *plan.page_orders.saved_pages.tolist()}
    if plan.started is not None:
        for of_row, first in zip(plan.started.pages, plan.started.first_position.tolist(), strict=True):
            pages.update(of_row[: first // page_size].tolist())
    return pages


def pages_begun(plan: Plan, page_size: int) -> list[int]:
    """Pages that the plan gives to rows that will write them, and those that it zeroes, copies to or loads."""
    pages: list[int] = plan.append_pages.tolist()
    if plan.started is not None:
        for of_row, first in zip(plan.started.pages, plan.started.first_position.tolist(), strict=True):
            pages += of_row[first // page_size :].tolist()
    if orders := plan.page_orders:
        pages += [*orders.zeroed.tolist(), *orders.copied_to.tolist(), *orders.loaded_pages.tolist()]
    return pages


def _pages_filled(plan: Plan, tables: RowTables) -> list[int]:
    """Pages that are full after the step and were not before it; `tables` have the positions before it."""
    size = tables.geometry.page_size
    pages: list[int] = []
    places = tables.position[plan.decode_rows] & (size - 1)
    if places.size and places[places.argmax()] == size - 1:
        rows = plan.decode_rows[places == size - 1]
        pages += tables.page_table[rows, tables.position[rows] // size].tolist()
    if plan.chunk_rows.size:
        for row, start, count in zip(
            plan.chunk_rows.tolist(), plan.chunk_starts.tolist(), plan.chunk_counts.tolist(), strict=True
        ):
            pages += tables.page_table[row, start // size : (start + count) // size].tolist()
    if plan.page_orders:
        pages += plan.page_orders.loaded_pages.tolist()
    return pages
