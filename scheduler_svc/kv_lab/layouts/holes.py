"""Free runs of slots between extents, first fit. Owns their order and their merging; knows nothing of sequences."""

from bisect import bisect_left


class Holes:
    """Runs [start, end), in order of their starts; no two touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, total: int) -> None:
        self._starts = [0]
        self._ends = [total]

    def largest(self) -> int:
        """Slots in the largest; 0 where there is none."""
        return max((end - start for start, end in self.runs()), default=0)

    def runs(self) -> list[tuple[int, int]]:
        """All of them, lowest first."""
        return list(zip(self._starts, self._ends, strict=True))

    def take_first(self, count: int) -> int | None:
        """The lowest start with `count` slots behind it, taken; None, and no change, where there is none."""
        for at, start in enumerate(self._starts):
            if self._ends[at] - start >= count:
                self._cut(at, count)
                return start
        return None

    def take_behind(self, start: int, most: int) -> int:
        """Takes up to `most` slots from `start` on; how many there were."""
        at = bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            return 0
        count = min(most, self._ends[at] - start)
        self._cut(at, count)
        return count

    def give(self, start: int, end: int) -> None:
        """The run [start, end) is free again."""
        at = bisect_left(self._starts, start)
        joins_next = at < len(self._starts) and self._starts[at] == end
        joins_last = at > 0 and self._ends[at - 1] == start
        if joins_last and joins_next:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_last:
            self._ends[at - 1] = end
        elif joins_next:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def _cut(self, at: int, count: int) -> None:
        self._starts[at] += count
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
