"""Owns one histogram's numbers: how many values each bucket has, and their sum."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """A bucket has the values above the bound before it, up to and with its own bound; the last one has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cells(self) -> list[float]:
        """The counts, then the sum."""
        return [*self.counts, self.sum]
