"""The pretend KV memory on the device and in host memory: per slot a token, its position and the hash up to it.

Owns the slots' content, which outlives rows and generations, as in a real pool. Does not know which row may use a page:
it detects a read that does not return the row's history, and a write to a slot that is already written.
"""

from collections.abc import Collection

import numpy as np

from tests.rigs.plan_arrays import PlanArrays, PlanError


class Slots:
    """Content of some pages. A mark is the position plus one; 0 marks an unwritten slot."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        shape = num_pages, page_size
        self.tokens = np.zeros(shape, np.int32)
        self.marks = np.zeros(shape, np.int32)
        self.hashes = np.zeros(shape, np.uint64)
        # The newest generation that may have written to it.
        self.generation = 0
        # Slots with nonfinite values; only overwriting clears them.
        self.nonfinite = np.zeros(shape, np.bool_)

    def zero(self, page: int | slice) -> None:
        for array in (self.tokens, self.marks, self.hashes, self.nonfinite):
            array[page] = 0

    def take(self, target: int, other: "Slots", source: int, count: int) -> None:
        """Copies the first `count` slots of a page, from this pool or another."""
        for name in ("tokens", "marks", "hashes", "nonfinite"):
            getattr(self, name)[target, :count] = getattr(other, name)[source, :count]


class PagePool:
    """num_pages x page_size slots on the device, and host_pages x page_size in host memory."""

    def __init__(self, *, num_pages: int, page_size: int, host_pages: int, max_length: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._host = Slots(host_pages, page_size)
        self._saved = np.zeros(host_pages, np.bool_)
        positions = np.arange(max_length + 1)
        self._page_of, self._offset = positions // page_size, positions % page_size
        self._marks_wanted = positions.astype(np.int32) + 1
        # True once any slot was nonfinite; until then `read` skips the check.
        self._suspicious = False
        self.use(Slots(num_pages, page_size))

    @property
    def device(self) -> Slots:
        return self._device

    def use(self, device: Slots) -> None:
        """Replaces the memory of the device pages by another, with its content."""
        self._device = device
        self._suspicious |= bool(device.nonfinite.any())
        self._flat = tuple(
            array.reshape(-1)
            for array in (self._device.tokens, self._device.marks, self._device.hashes, self._device.nonfinite)
        )

    # Reading and writing -----------------------------------------------------------------------------------------

    def read(self, row: int, pages: np.ndarray, span: slice, tokens: np.ndarray, hashes: np.ndarray) -> list[int]:
        """Compares the slots of the positions in `span` with the row's history; returns the positions that are
        nonfinite.

        pages: int64, the row's page list. tokens: int32, hashes: uint64, for all of the row's positions. Raises
        PlanError with the first difference.
        """
        size = self.page_size
        slots = pages[self._page_of[span]] * size + self._offset[span]
        all_tokens, all_marks, all_hashes, nonfinite = self._flat
        good = (all_marks[slots] == self._marks_wanted[span]) & (all_hashes[slots] == hashes[span])
        if not good.all():
            idx = int(np.argmin(good))
            position, slot = span.start + idx, int(slots[idx])
            raise PlanError(
                f"row {row}: position {position} on page {slot // size} reads back token {int(all_tokens[slot])} of"
                f" position {int(all_marks[slot]) - 1}, expected token {int(tokens[position])} after the row's own"
                " history: the page was overwritten, allocated again, never written, or is not the row's"
            )
        return (span.start + np.flatnonzero(nonfinite[slots])).tolist() if self._suspicious else []

    def write(
        self, row: int, pages: np.ndarray, start: int, tokens: list[int], hashes: np.ndarray, bad: list[int]
    ) -> None:
        """Writes the positions from `start` on; those in `bad` become nonfinite. hashes: of the positions."""
        all_tokens, all_marks, all_hashes, nonfinite = self._flat
        size = self.page_size
        for idx, token in enumerate(tokens):
            position = start + idx
            slot = int(pages[position // size]) * size + position % size
            if all_marks[slot]:
                raise PlanError(
                    f"row {row} writes position {position} on page {slot // size}, whose slot holds position"
                    f" {int(all_marks[slot]) - 1} since its allocation: a page that was filled is written again"
                )
            all_tokens[slot], all_marks[slot], all_hashes[slot] = token, position + 1, hashes[idx]
            nonfinite[slot] = position in bad
        self._suspicious |= bool(bad)

    def give(self, row: int, page: int, first_slot: int) -> None:
        """Allocates the page to a row that writes from `first_slot` on; the slots from there on become unwritten."""
        if self._suspicious and self._device.nonfinite[page, first_slot:].any():
            # Attention multiplies masked positions, too, and 0 x NaN is NaN.
            raise PlanError(f"row {row} was given page {page}, which holds values that are not finite")
        self._device.marks[page, first_slot:] = 0

    # Moves of a plan, before anything is written -----------------------------------------------------------------

    def reset(self) -> None:
        """Clears all pages, as at the start; host memory is empty."""
        self._device.zero(slice(1, None))
        self._saved[:] = False
        self._suspicious = False

    def keep(self, pages: Collection[int]) -> None:
        """A new session begins with the content of these pages; the others hold values that are not finite."""
        others = [page for page in range(1, self.num_pages) if page not in pages]
        self._device.nonfinite[others] = True
        self._saved[:] = False
        self._suspicious = True

    def move(self, arrays: PlanArrays) -> set[int]:
        """Saves, zeroes, copies and loads, in this order; returns the pages that copies and loads filled."""
        self._check_moves(arrays)
        for page, slot in arrays.saves:
            self._host.take(slot, self._device, page, self.page_size)
            self._saved[slot] = True
        for page in arrays.zero_pages:
            self._device.zero(page)
        for source, target, count in arrays.copies:
            self._check_source(source, count)
            self._device.take(target, self._device, source, count)
            self._device.marks[target, count:] = 0
        for page, slot in arrays.loads:
            if not self._saved[slot]:
                raise PlanError(f"page {page} is loaded from host page {slot}, which no save has written")
            self._device.take(page, self._host, slot, self.page_size)
        return {target for _, target, _ in arrays.copies} | {page for page, _ in arrays.loads}

    def _check_moves(self, arrays: PlanArrays) -> None:
        sources = {source for source, _, _ in arrays.copies}
        targets = [target for _, target, _ in arrays.copies]
        for what, pages in (
            ("saved", [page for page, _ in arrays.saves]),
            ("zeroed", arrays.zero_pages),
            ("copied from", sources),
            ("copied to", targets),
            ("loaded", [page for page, _ in arrays.loads]),
        ):
            self._check_pages(what, list(pages), sources)
        slots = [slot for _, slot in arrays.saves + arrays.loads]
        for slot in slots:
            if not 0 <= slot < len(self._saved):
                raise PlanError(f"host page {slot} is outside 0 … {len(self._saved) - 1}")
        if len({slot for _, slot in arrays.saves}) != len(arrays.saves):
            raise PlanError("a host page is saved to twice in one plan")

    def _check_pages(self, what: str, pages: list[int], sources: set[int]) -> None:
        for page in pages:
            if not 0 < page < self.num_pages:
                raise PlanError(f"page {page} is to be {what}, outside 1 … {self.num_pages - 1}")
            if page in sources and what in ("zeroed", "copied to", "loaded"):
                raise PlanError(f"page {page} is {what} by the plan that copies from it")
        if what in ("copied to", "loaded") and len(set(pages)) != len(pages):
            raise PlanError(f"a page is {what} twice in one plan")

    def _check_source(self, page: int, count: int) -> None:
        if not 1 <= count <= self.page_size:
            raise PlanError(f"{count} slots of page {page} are copied, a page has {self.page_size}")
        marks = self._device.marks[page, :count]
        if marks[0] == 0 or (marks != marks[0] + np.arange(count)).any():
            written = int(np.argmin(np.append(marks != 0, False)))
            raise PlanError(f"{count} slots of page {page} are copied, of which {written} were written")

    def spoil(self, arrays: PlanArrays) -> None:
        """A step failed half-way: the slots that it was to write are unwritten, and none of them is zeroed."""
        pages = {page for page, _ in arrays.loads} | {target for _, target, _ in arrays.copies}
        pages |= {page for _, page in arrays.appends}
        for started in arrays.started:
            pages.update(started.pages[started.first_position // self.page_size :])
        for page in pages:
            self._device.marks[page] = 0
        for _, slot in arrays.saves:
            self._saved[slot] = False
