"""One extent per sequence, allocated first fit, which grows as a list does. Owns the extents and their holes.

A full extent takes slots from the hole behind it. Without such a hole it moves with all its tokens into the
first hole that holds it with room to grow, or else into the first that holds one more token. While an extent moves it
holds both places. With a window an extent as long as the window becomes a ring buffer and stops growing.
"""

from dataclasses import dataclass

from scheduler_svc.simulator.memory.layouts.holes import Holes
from scheduler_svc.simulator.memory.layouts.layout import Layout
from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Sequence


@dataclass(slots=True)
class _Extent:
    start: int
    capacity: int
    length: int


class Growing(Layout):
    """A new extent has exactly the slots of its tokens."""

    name = "growing"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._span = settings.span
        self._longest = settings.reserve
        self._growth = settings.growth
        self._holes = Holes(self.total)
        self._held: dict[int, _Extent] = {}

    def could_ever_hold(self, length: int) -> bool:
        # A sequence alone starts at slot 0 and never needs to move.
        return length <= self._longest and self._new_capacity(length) <= self.total

    def admit(self, sequence: Sequence, length: int) -> int | None:
        capacity = self._new_capacity(length)
        start = self._holes.take_first(capacity)
        if start is None:
            self.refused_by_fragmentation += self.free >= capacity
            return None
        self._held[sequence.index] = _Extent(start, capacity, length)
        self.reserved += capacity
        self.used += min(length, self._span)
        return 0

    def grow(self, sequence: Sequence) -> bool:
        extent = self._held[sequence.index]
        if extent.length < self._span:
            if extent.length == extent.capacity and not self._enlarge(extent):
                return False
            self.used += 1
        extent.length += 1
        return True

    def release(self, sequence: Sequence) -> None:
        extent = self._held.pop(sequence.index)
        self._holes.give(extent.start, extent.start + extent.capacity)
        self.reserved -= extent.capacity
        self.used -= min(extent.length, self._span)

    def _new_capacity(self, length: int) -> int:
        """Returns the slots of a new extent for `length` tokens."""
        return min(length, self._span)

    def _enlarge(self, extent: _Extent) -> bool:
        before = extent.capacity
        target = min(self._span, max(before + 1, int(before * self._growth)))
        taken = self._holes.take_behind(extent.start + before, target - before)
        if taken:
            extent.capacity += taken
            self.reserved += taken
            return True
        for capacity in (target, before + 1):
            start = self._holes.take_first(capacity)
            if start is not None:
                break
        else:
            # It needs only one more slot, but all of them in one run.
            self.refused_by_fragmentation += self.free >= 1
            return False
        self._holes.give(extent.start, extent.start + before)
        extent.start, extent.capacity = start, capacity
        self.reserved += capacity - before
        self.moves += 1
        self.moved += extent.length
        return True

    def largest_hole(self) -> int:
        return self._holes.largest()
