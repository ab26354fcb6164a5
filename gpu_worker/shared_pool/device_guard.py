"""`PageGuard` for a pool whose steps are in flight when they are submitted: checksums arrive with their ends."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.device_checksum import DeviceChecksums
from gpu_worker.shared_pool.guard import PageGuard, pages_begun
from gpu_worker.shared_pool.header import Header
from gpu_worker.wire.frames import Plan


@dataclass(slots=True, kw_only=True, eq=False)
class _Filled:
    """Pages that a step in flight fills, without those that a later plan has begun to write."""

    pages: set[int]


class DeviceGuard(PageGuard):
    """`checksums` are set before the first step."""

    checksums: DeviceChecksums

    def __init__(self, header: Header, num_pages: int) -> None:
        super().__init__(header, num_pages)
        self._in_flight: list[_Filled] = []

    def forget(self) -> None:
        """The pool was zeroed: there is nothing to check, and nothing that steps in flight filled is left."""
        super().forget()
        self._in_flight = []

    def taken_over(self) -> None:
        """The pool is now that of a dead worker."""
        super().taken_over()
        self._in_flight = []

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """As `PageGuard.begin_step`. It waits for the device only for pages of a dead worker that were not checked."""
        super().begin_step(plan, tables)
        if self._in_flight:
            begun = pages_begun(plan, tables.geometry.page_size)
            for filled in self._in_flight:
                filled.pages.difference_update(begun)

    def end_step(self, step: int) -> Callable[[], None] | None:
        """Enqueues the checksums of the pages that the last step fills; the step is enqueued.

        The function, called when this work has ended, records them. None if no page was filled.
        """
        if not self._filled:
            return None
        pages, self._filled = self._filled, []
        read, filled = self.checksums.begin(pages), _Filled(pages=set(pages))
        self._in_flight.append(filled)

        def record() -> None:
            if filled in self._in_flight:
                self._in_flight.remove(filled)
                found = zip(pages, read(), strict=True)
                self._record(((page, checksum) for page, checksum in found if page in filled.pages), step)

        return record

    def _checksums_of(self, pages: Sequence[int]) -> Iterable[int]:
        return self.checksums.of(pages)
