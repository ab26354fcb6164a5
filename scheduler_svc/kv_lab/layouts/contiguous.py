"""A fixed reservation for every sequence, with the slots of the longest one. Owns the free reservations.

With a window a reservation is a ring buffer of its length.
"""

from collections.abc import Mapping

from scheduler_svc.kv_lab.layouts.layout import Extents, Layout
from scheduler_svc.kv_lab.settings import Settings
from scheduler_svc.kv_lab.workload import Sequence


class Contiguous(Layout):
    """Reservations start at multiples of their size."""

    name = "contiguous"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._span = settings.span
        self._longest = settings.reserve
        self.overhead = self.total % self._span
        # Reversed, because pop() takes the last one, which must be the lowest.
        self._starts = list(range(0, self.total - self.overhead, self._span))[::-1]
        self._held: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def could_ever_hold(self, length: int) -> bool:
        return length <= self._longest and self._span <= self.total

    def admit(self, sequence: Sequence, length: int) -> int | None:
        if not self._starts:
            return None
        self._held[sequence.index] = self._starts.pop()
        self._lengths[sequence.index] = length
        self.reserved += self._span
        self.used += min(length, self._span)
        return 0

    def grow(self, sequence: Sequence) -> bool:
        length = self._lengths[sequence.index]
        self._lengths[sequence.index] = length + 1
        if length < self._span:
            self.used += 1
        return True

    def release(self, sequence: Sequence) -> None:
        self._starts.append(self._held.pop(sequence.index))
        self.reserved -= self._span
        self.used -= min(self._lengths.pop(sequence.index), self._span)

    def extents(self) -> Mapping[int, Extents]:
        return {index: [(start, start + self._span)] for index, start in self._held.items()}

    def lengths(self) -> Mapping[int, int]:
        return self._lengths
