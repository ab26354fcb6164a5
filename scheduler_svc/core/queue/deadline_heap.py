"""The times at which requests end: time limits, deadlines of callers, and the ends of waits."""

import heapq
from collections.abc import Callable
from enum import StrEnum

from scheduler_svc.core.state.request import Request


class DeadlineKind(StrEnum):
    """Why a request ends at a deadline: the end of one of its times."""

    TIME_LIMIT = "time limit"
    DEADLINE = "deadline"
    WORKER_WAIT = "worker wait"
    QUEUE_TIME = "queue time"


class DeadlineHeap:
    """A heap of time, handle and kind. The entry of a request that has ended is dropped when it is the earliest.

    `live` returns the live request with a handle, or None.
    """

    def __init__(self, live: Callable[[int], Request | None]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, DeadlineKind]] = []

    def add(self, at: float, request: Request, kind: DeadlineKind) -> None:
        """Adds a time at which the request ends."""
        heapq.heappush(self._heap, (at, request.handle, kind))

    def pop(self, now: float, num_live: int) -> tuple[Request, DeadlineKind, float] | None:
        """Removes and returns the earliest deadline, with its time, if it has passed. Otherwise returns None."""
        heap = self._heap
        while heap and (heap[0][0] <= now or self._live(heap[0][1]) is None):
            at, handle, kind = heapq.heappop(heap)
            request = self._live(handle)
            if request is not None:
                return request, kind, at
        if len(heap) > 2 * num_live + 64:
            self._heap = [entry for entry in heap if self._live(entry[1]) is not None]
            heapq.heapify(self._heap)
        return None

    def next(self) -> float | None:
        """Returns the earliest deadline, or None. It may belong to a request that has ended."""
        return self._heap[0][0] if self._heap else None
