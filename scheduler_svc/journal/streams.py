"""The kept streams of one front end: the request of a stream, and the journal's numbers of a step's streams."""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")


class KeptStreams(Generic[_T]):
    """Ranges of streams that do not overlap, each of one request."""

    def __init__(self) -> None:
        # First stream: number of streams, number of the first sample, the request.
        self._ranges: dict[int, tuple[int, int, _T]] = {}
        self._is_sorted = False
        self._starts = self._lasts = self._shifts = np.zeros(0, np.uint64)

    def add(self, stream: int, count: int, number: int, request: _T) -> None:
        """Adds `count` streams from `stream` on; the first one has this number."""
        self._ranges[stream] = count, number, request
        self._is_sorted = False

    def remove(self, stream: int, request: _T) -> bool:
        """Removes the range that begins with `stream` if it is the request's. Returns whether no range is left."""
        found = self._ranges.get(stream)
        if found is not None and found[2] is request:
            del self._ranges[stream]
            self._is_sorted = False
        return not self._ranges

    def find(self, stream: int) -> tuple[_T, int] | None:
        """Returns the request of a stream and the index of its sample, None if it is not kept."""
        self._sort()
        i = int(self._starts.searchsorted(np.uint64(stream), "right")) - 1
        if i < 0 or stream > int(self._lasts[i]):
            return None
        start = int(self._starts[i])
        return self._ranges[start][2], stream - start

    def numbers(self, streams: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
        """Returns the number of each stream, uint64[n], and which of them are kept, bool[n]; None if all are."""
        self._sort()
        i = self._starts.searchsorted(streams, "right")
        # An index of 0 becomes the last range, which ends above or begins above the stream; both are checked.
        i -= 1
        is_kept = (streams >= self._starts[i]) & (streams <= self._lasts[i])
        # Unsigned sums wrap around, so a shift may be negative.
        return streams + self._shifts[i], None if is_kept.all() else is_kept

    def _sort(self) -> None:
        if self._is_sorted:
            return
        self._is_sorted = True
        starts = sorted(self._ranges)
        self._starts = np.array(starts, np.uint64)
        # The last one, not the end, which may be 2**64.
        self._lasts = self._starts + np.array([self._ranges[start][0] - 1 for start in starts], np.uint64)
        self._shifts = np.array([self._ranges[start][1] for start in starts], np.uint64) - self._starts
