"""Percentiles of a stream of durations in constant memory.

Owns the buckets: each is half a percent wider than the one before it, so a percentile is off by a quarter of a percent
at most. Minimum, maximum, mean and count are exact.
"""

import math

import numpy as np
import numpy.typing as npt

_LEAST, _MOST = 1e-6, 1e6
_GROWTH = math.log(1.005)
_NUM = math.ceil(math.log(_MOST / _LEAST) / _GROWTH) + 2


class Histogram:
    """Of seconds. Below a microsecond all are alike, so are all above a million seconds."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM, np.int64)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Takes float64[n] in."""
        if not len(seconds):
            return
        least, most = float(seconds.min()), float(seconds.max())
        bucket = _bucket(most)
        if _bucket(least) == bucket:
            # As a rule: who decodes in two steps running waited from one to the other.
            self._counts[bucket] += len(seconds)
        else:
            logs = np.log(np.clip(seconds, _LEAST, _MOST) / _LEAST)
            self._counts += np.bincount((logs / _GROWTH).astype(np.int64) + 1, minlength=_NUM)
        self.count += len(seconds)
        self.total += float(seconds.sum())
        self.largest = max(self.largest, most)

    def add_one(self, seconds: float) -> None:
        """Takes one in."""
        self._counts[_bucket(seconds)] += 1
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)

    @property
    def mean(self) -> float:
        """0 where nothing came."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest bucket's middle below which so many percent lie; 0 where nothing came."""
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(self.count * percent / 100))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(self.largest, _LEAST * math.exp((bucket - 0.5) * _GROWTH))


def _bucket(seconds: float) -> int:
    return int(math.log(min(max(seconds, _LEAST), _MOST) / _LEAST) / _GROWTH) + 1
