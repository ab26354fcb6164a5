"""Free runs of slots between extents, taken first fit. Owns their order and their merging."""

from bisect import bisect_left


class Holes:
    """Runs [start, end) in the order of their starts. No two of them touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, total: int) -> None:
        self._starts = [0]
        self._ends = [total]

    def largest(self) -> int:
        """Returns the slots of the largest run, 0 if all slots are taken."""
        return max((end - start for start, end in self.runs()), default=0)

    def runs(self) -> list[tuple[int, int]]:
        """Returns all runs, the lowest first."""
        return list(zip(self._starts, self._ends, strict=True))

    def take_first(self, count: int) -> int | None:
        """Takes `count` slots from the lowest run that has them. Returns their start, or None if no run is so long."""
        for at, start in enumerate(self._starts):
            if self._ends[at] - start >= count:
                self._cut(at, count)
                return start
        return None

    def take_behind(self, start: int, limit: int) -> int:
        """Takes up to `limit` slots from `start` on. Returns how many it took."""
        at = bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            return 0
        count = min(limit, self._ends[at] - start)
        self._cut(at, count)
        return count

    def give(self, start: int, end: int) -> None:
        """Frees the run [start, end)."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            del self._starts[at]
            end = self._ends.pop(at)
        if at > 0 and self._ends[at - 1] == start:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def _cut(self, at: int, count: int) -> None:
        self._starts[at] += count
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
