"""The order of the waiting requests of one tenant: their sort keys, and the list of those that wait.

The key of a request never changes, so a preempted request returns to its old place. Admission looks at the first
requests, `WINDOW` for each lane, and may take them out of order, so these are a sorted list. All others are a heap.

**Lazy removal.** A request that stops waiting while it is in the list (it is cancelled, for example) leaves its entry
behind. The entry is dropped when it reaches the front.
"""

import heapq
from bisect import bisect_left, insort

from scheduler_svc.core.state.request import Phase, Request

AGEING_TOKENS = 65_536
"""Virtual time that one step of priority is worth. It is finite, so requests of low priority do not starve."""

QueueKey = tuple[int, int]
Entry = tuple[QueueKey, Request]
"""A waiting request with its `queue_key`."""


def queue_key(request: Request) -> QueueKey:
    """Returns the request's sort key among the requests of its tenant. The smallest key goes first."""
    return (request.virtual_start - request.submit.priority * AGEING_TOKENS, request.handle)


def running_key(request: Request) -> tuple[int, int, int]:
    """Returns the sort key of a running request among all: its turn, then its `queue_key`.

    Without a token file there is one tenant, so its queue keys alone give the order.
    """
    turn = request.turn if request.submit.tenant else 0
    return (turn, request.virtual_start - request.submit.priority * AGEING_TOKENS, request.handle)


def trial_key(request: Request) -> QueueKey:
    """Returns the key by which waiting requests of all tenants are compared with the suspects of a trial.

    The queue keys of two tenants say nothing about each other, so with a token file the order of arrival counts.
    """
    return (request.handle, 0) if request.submit.tenant else queue_key(request)


WINDOW = 32
"""Number of waiting requests, from the head of the queue, that the plan of one lane looks at."""


class WaitingList:
    """A sorted front and a heap. `len` is the number of requests without those that no longer wait."""

    def __init__(self) -> None:
        # No entry of `_rest` goes before an entry of `_front`.
        self._front: list[Entry] = []
        self._rest: list[Entry] = []
        self._count = 0
        # Whether an entry of `_front` may belong to a request that no longer waits.
        self._has_left = False

    def __len__(self) -> int:
        return self._count

    def insert(self, request: Request) -> None:
        """Inserts a waiting request at its place."""
        self._count += 1
        entry = (queue_key(request), request)
        if self._rest and (not self._front or entry > self._front[-1]):
            heapq.heappush(self._rest, entry)
            return
        insort(self._front, entry)
        if len(self._front) > WINDOW:
            heapq.heappush(self._rest, self._front.pop())

    def first(self, count: int = WINDOW) -> list[Entry]:
        """Returns the first `count` requests in order. The list is valid until the next change."""
        front, rest = self._front, self._rest
        if self._has_left:
            front[:] = [entry for entry in front if entry[1].phase is Phase.WAITING]
            self._has_left = False
        while rest and len(front) < count:
            entry = heapq.heappop(rest)
            if entry[1].phase is Phase.WAITING:
                front.append(entry)
        return front if len(front) <= count else front[:count]

    def head(self) -> Entry | None:
        """Returns the first entry, or None if no request waits."""
        front = self._front if self._front and self._front[0][1].phase is Phase.WAITING else self.first()
        return front[0] if front else None

    def take(self, request: Request) -> None:
        """Removes one of the requests that `first` returned. Raises AssertionError for another one."""
        i = bisect_left(self._front, (queue_key(request),))
        found = i < len(self._front) and self._front[i][1] is request
        assert found, f"request {request.submit.request_id} is not among the first that wait"
        del self._front[i]
        self._count -= 1

    def left(self) -> None:
        """Counts a request that no longer waits. Its entry is dropped later."""
        self._count -= 1
        self._has_left = True
        if len(self._rest) > 2 * self._count + 64:
            self._rest[:] = [entry for entry in self._rest if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._rest)

    def discard(self, request: Request) -> None:
        """Removes a request that goes on waiting elsewhere. It takes O(n)."""
        self._front = [entry for entry in self._front if entry[1] is not request]
        self._rest = [entry for entry in self._rest if entry[1] is not request]
        heapq.heapify(self._rest)
        self._count -= 1

    def all(self) -> list[Request]:
        """Returns all requests in order. It takes O(n log n), so only audits and rare operations call it."""
        return [entry[1] for entry in sorted(self._front + self._rest) if entry[1].phase is Phase.WAITING]
