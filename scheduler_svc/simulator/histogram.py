"""Percentiles of a stream of durations in constant memory.

Owns the buckets. Each is half a percent wider than the one before it, so a percentile is off by at most a quarter of a
percent. Maximum, mean and count are exact.
"""

import math

import numpy as np
import numpy.typing as npt

_MIN, _MAX = 1e-6, 1e6
_GROWTH = math.log(1.005)
_NUM = math.ceil(math.log(_MAX / _MIN) / _GROWTH) + 2


class Histogram:
    """A histogram of seconds. Values outside one microsecond to a million seconds fall into the outermost buckets."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM, np.int64)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Adds float64[n]."""
        if not len(seconds):
            return
        low, high = float(seconds.min()), float(seconds.max())
        bucket = _bucket(high)
        if _bucket(low) == bucket:
            # The usual case: all rows that decode in two successive steps waited equally long.
            self._counts[bucket] += len(seconds)
        else:
            logs = np.log(np.clip(seconds, _MIN, _MAX) / _MIN)
            self._counts += np.bincount((logs / _GROWTH).astype(np.int64) + 1, minlength=_NUM)
        self.count += len(seconds)
        self.total += float(seconds.sum())
        self.largest = max(self.largest, high)

    def add_one(self, seconds: float) -> None:
        """Adds one value."""
        self._counts[_bucket(seconds)] += 1
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)

    @property
    def mean(self) -> float:
        """The mean, 0 if the histogram is empty."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Returns the middle of the bucket that holds this percentile, 0 if the histogram is empty."""
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(self.count * percent / 100))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(self.largest, _MIN * math.exp((bucket - 0.5) * _GROWTH))


def _bucket(seconds: float) -> int:
    return int(math.log(min(max(seconds, _MIN), _MAX) / _MIN) / _GROWTH) + 1
