"""Pages from the core's own pool, which sequences do not share. Owns the page tables.

Page 0, the pool's padding page, is overhead, as is the memory behind the last whole page. With a window, a running
sequence releases the pages wholly behind it, and a prompt gets only the window's pages, as if it came in chunks.
"""

from dataclasses import dataclass

from scheduler_svc.core.pages.page_pool import PagePool
from scheduler_svc.simulator.memory.layouts.layout import Layout
from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Sequence


@dataclass(slots=True)
class Table:
    """The pages of one sequence. `pages[i]` holds the positions from `(first + i) × page_size` on."""

    pages: list[int]
    first: int
    length: int


class Paged(Layout):
    """Any free page fits any sequence."""

    name = "paged"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._page_size = settings.page_size
        self._longest = settings.reserve
        self._window = settings.window
        num_pages = self.total // self._page_size
        self._pool = PagePool(num_pages)
        self.overhead = self.total - (num_pages - 1) * self._page_size
        self._held: dict[int, Table] = {}

    def could_ever_hold(self, length: int) -> bool:
        # A growing sequence allocates a new page before it releases the one that leaves the window.
        held = length if self._window is None else min(length, self._window + 2 * self._page_size)
        return length <= self._longest and self._num_pages(held) * self._page_size <= self.total - self.overhead

    def admit(self, sequence: Sequence, length: int) -> int | None:
        first = self._first(length)
        pages = self._pool.allocate(self._num_pages(length) - first)
        if pages is None:
            return None
        self._held[sequence.index] = Table(pages, first, length)
        self.reserved += len(pages) * self._page_size
        self.used += length - first * self._page_size
        return 0

    def grow(self, sequence: Sequence) -> bool:
        table = self._held[sequence.index]
        if table.length % self._page_size == 0:
            page = self._pool.allocate(1)
            if page is None:
                return False
            table.pages += page
            self.reserved += self._page_size
        table.length += 1
        self.used += 1
        # Pages that hold no position of the window are released.
        behind = self._first(table.length) - table.first
        if behind > 0:
            self._release(table.pages[:behind])
            del table.pages[:behind]
            table.first += behind
        return True

    def release(self, sequence: Sequence) -> None:
        table = self._held.pop(sequence.index)
        self._pool.release(table.pages)
        self.reserved -= len(table.pages) * self._page_size
        self.used -= table.length - table.first * self._page_size

    def _release(self, pages: list[int]) -> None:
        self._pool.release(pages)
        self.reserved -= len(pages) * self._page_size
        self.used -= len(pages) * self._page_size

    def _first(self, length: int) -> int:
        """Returns the index of the first page that a sequence of `length` tokens holds."""
        return 0 if self._window is None else max(0, length - self._window) // self._page_size

    def _num_pages(self, length: int) -> int:
        return -(-length // self._page_size)
