"""Keeps track of which pages of a shared pool are whole, and checks those of a dead worker before they are read.

Before a step writes to a page, the page is marked as not whole. After the step, each page that it filled gets its
checksum and the step's number. A worker that takes the pool over compares the checksum of a page when a row first
starts with it, so that only pages that are used are read, each once.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.errors import PageDamaged
from gpu_worker.shared_pool.header import Header
from gpu_worker.wire.frames import Plan

_NO_PAGES = np.zeros(0, np.int64)


class PageGuard:
    """`checksum` returns that of a page's present content. Set before the first step."""

    checksum: Callable[[int], int]

    def __init__(self, header: Header, num_pages: int) -> None:
        self._header = header
        # Pages that a dead worker wrote and that were not checked yet.
        self._is_unchecked = np.zeros(num_pages, np.bool_)
        self._may_be_unchecked = False
        self._filled = _NO_PAGES
        self._generation = 0

    def begin_generation(self, generation: int) -> None:
        """Plans of this generation follow."""
        self._generation = generation
        self._header.begin_generation(generation)

    def forget(self) -> None:
        """The pool was zeroed: there is nothing to check."""
        self._is_unchecked[:] = self._may_be_unchecked = False
        self._header.begin_generation(self._generation)

    def taken_over(self) -> None:
        """The pool is now that of a dead worker."""
        self._is_unchecked[:] = self._may_be_unchecked = True
        self._header.begin_generation(self._generation)

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """Checks the pages that the plan's rows start with, and marks those that the step writes.

        `tables` have the plan's rows and pages, and positions before the step. Raises PageDamaged.
        """
        begun, self._filled = _pages_written(plan, tables)
        if self._may_be_unchecked and (plan.started is not None or plan.page_orders):
            for page in _pages_read(plan, tables, begun):
                self._check(page)
        if begun.size:
            self._header.filled_by[begun] = 0
            self._is_unchecked[begun] = False

    def end_step(self, step: int) -> None:
        """Records the checksums of the pages that the last step filled; it has ended."""
        if self._filled.size:
            stamp = self._generation << 32 | step
            for page in self._filled.tolist():
                self._header.checksums[page] = self.checksum(page)
                # Written last: until then the page is not whole.
                self._header.filled_by[page] = stamp
            self._filled = _NO_PAGES

    def _check(self, page: int) -> None:
        if not self._is_unchecked[page]:
            return
        stamp = int(self._header.filled_by[page])
        if not stamp:
            raise PageDamaged(f"page {page} of the pool that was taken over is not whole")
        if self.checksum(page) != int(self._header.checksums[page]):
            raise PageDamaged(
                f"page {page} of the pool that was taken over has changed since step {stamp & 0xFFFFFFFF} of "
                f"generation {stamp >> 32} filled it"
            )
        self._is_unchecked[page] = False


def _pages_read(plan: Plan, tables: RowTables, begun: NDArray[np.int64]) -> list[int]:
    """Pages that rows of the plan start with, and that are copied or saved, without those that the plan writes."""
    pages: set[int] = {*plan.page_orders.copied_from.tolist(), *plan.page_orders.saved_pages.tolist()}
    if plan.started is not None:
        size = tables.geometry.page_size
        for own, first in zip(plan.started.pages, plan.started.first_position.tolist(), strict=True):
            pages.update(own[: first // size].tolist())
    # Page 0 stands for a page that nothing reads.
    return sorted(pages - {0, *begun.tolist()})


def _pages_written(plan: Plan, tables: RowTables) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pages int64 that the step begins to write, and those that it fills.

    A row begins a page at its first position, or in the middle of a copy.
    """
    size, shift = tables.geometry.page_size, int(tables.page_shift)
    rows, begun, filled = plan.decode_rows, [_NO_PAGES], [_NO_PAGES]
    places = tables.position[rows] & (size - 1)
    for pages, place in ((begun, 0), (filled, size - 1)):
        is_there = places == place
        if is_there.any():
            found = rows[is_there]
            pages.append(tables.page_table[found, tables.position[found] >> shift])
    for row, start, count in zip(
        plan.chunk_rows.tolist(), plan.chunk_starts.tolist(), plan.chunk_counts.tolist(), strict=True
    ):
        first, end = start >> shift, start + count
        begun.append(tables.page_table[row, first : ((end - 1) >> shift) + 1])
        filled.append(tables.page_table[row, first : end >> shift])
    orders = plan.page_orders
    if orders:
        begun += [orders.zeroed, orders.copied_to, orders.loaded_pages]
        filled.append(orders.loaded_pages)
    return _joined(begun), _joined(filled)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64) if len(parts) > 1 else _NO_PAGES
