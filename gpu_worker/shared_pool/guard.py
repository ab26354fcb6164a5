"""Keeps track of which pages of a shared pool are whole, and checks those of a dead worker before they are read.

Before a step writes to a page, the page is marked as not whole. After the step, each page that it filled gets its
checksum and the step's number. A worker that takes the pool over compares the checksum of a page when a row first
starts with it, so that only pages that are used are read, each once.
"""

from collections.abc import Callable, Sequence

from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.checksum import PageChecksums
from gpu_worker.shared_pool.messages import PageDamaged
from gpu_worker.shared_pool.region import Header
from gpu_worker.wire.frames import Plan


class PageGuard:
    """`checksums` are set before the first step."""

    checksums: PageChecksums

    def __init__(self, header: Header, num_pages: int) -> None:
        self._header = header
        # Pages that a dead worker wrote and that were not checked yet.
        self._is_unchecked = bytearray(num_pages)
        self._may_be_unchecked = False
        self._filled: list[int] = []
        # Of each step in flight that fills pages, those that no later plan has begun to write.
        self._in_flight: list[set[int]] = []
        self._generation = 0

    def begin_generation(self, generation: int) -> None:
        """Plans of this generation follow."""
        self._generation = generation
        self._header.begin_generation(generation)

    def forget(self) -> None:
        """The pool was zeroed: there is nothing to check, and nothing that steps in flight filled is left."""
        self._restart(is_unchecked=False)

    def taken_over(self) -> None:
        """The pool is now that of a dead worker."""
        self._restart(is_unchecked=True)

    def _restart(self, *, is_unchecked: bool) -> None:
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
            pages = sorted(_pages_read(plan, tables.geometry.page_size) - {0, *begun})
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


def _pages_read(plan: Plan, page_size: int) -> set[int]:
    """Pages that rows of the plan start with, and that are copied or saved. Page 0 stands for one that nobody reads."""
    pages: set[int] = {*plan.page_orders.copied_from.tolist(), *plan.page_orders.saved_pages.tolist()}
    if plan.started is not None:
        for own, first in zip(plan.started.pages, plan.started.first_position.tolist(), strict=True):
            pages.update(own[: first // page_size].tolist())
    return pages


def pages_begun(plan: Plan, page_size: int) -> list[int]:
    """Pages that the plan gives to rows that will write them, and those that it zeroes, copies to or loads."""
    pages: list[int] = plan.append_pages.tolist()
    if plan.started is not None:
        for own, first in zip(plan.started.pages, plan.started.first_position.tolist(), strict=True):
            pages += own[first // page_size :].tolist()
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
