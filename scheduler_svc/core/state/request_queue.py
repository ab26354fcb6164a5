"""All live requests, the queue of those that wait, and their deadlines.

**Order.** Requests wait in one queue and are not assigned to a lane. The order is by virtual start time (`fair_share`),
minus `AGEING_TOKENS` for each step of priority, then by arrival. This key never changes, so a preempted request returns
to its old place. Admission looks at the first `WINDOW` waiting requests and may admit them out of order, so these are a
sorted list. All others are a heap.

**Lazy removal.** A request that stops waiting while it is in the queue (it is cancelled, for example) leaves its entry
behind. The entry is dropped when it reaches the front.

**Set aside.** A request that no present worker can hold is taken out of the queue, so that it does not block those
behind it. It goes back when another worker is proven, or when the last worker is lost.

**Parked.** A request whose tenant has all rows of its `row_share` is taken out of the queue, too (`park`). Whenever a
request of the tenant leaves the queue or a row, the first parked one goes back.

**Held.** A suspect (`suspicion/suspects.py`) is taken out of the queue until it is cleared. Only its trial admits it.

**Deadlines.** A heap contains the times at which requests end: time limits, deadlines of callers, and the end of the
wait for a worker. The entry of a request that has ended is dropped when it is the earliest.
"""

import heapq
from bisect import insort
from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from scheduler_svc.core.quotas.account import Account, Accounts
from scheduler_svc.core.state.fair_share import FairShare
from scheduler_svc.core.state.request import Phase, Request

AGEING_TOKENS = 65_536
"""Virtual time that one step of priority is worth. It is finite, so requests of low priority do not starve."""
WINDOW = 32
"""Number of waiting requests, from the head of the queue, that admission looks at."""


def queue_key(request: Request) -> tuple[int, int]:
    """Returns the request's sort key in the queue. The smallest key goes first."""
    return (request.virtual_start - request.priority * AGEING_TOKENS, request.arrival)


_Entry = tuple[tuple[int, int], Request]


class DeadlineKind(StrEnum):
    """Why a request ends at a deadline: the end of one of its times."""

    TIME_LIMIT = "time limit"
    DEADLINE = "deadline"
    WORKER_WAIT = "worker wait"
    QUEUE_TIME = "queue time"


class RequestQueue:
    """All live requests. Iteration and `len` include the running ones."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}
        self._by_stream: dict[tuple[str, int], Request] = {}
        self._by_id: dict[str, list[Request]] = {}
        # `_front` is sorted and `_rest` is a heap. No entry of `_rest` goes before an entry of `_front`.
        self._front: list[_Entry] = []
        self._rest: list[_Entry] = []
        self._set_aside: dict[int, Request] = {}
        # Handles of the requests that are held, and those of them that wait.
        self._held: set[int] = set()
        self._held_waiting: dict[int, Request] = {}
        # Parked requests by tenant: a heap in the order of the queue, and the handles of all that are parked.
        self._parked: dict[str, list[_Entry]] = {}
        self._parked_handles: set[int] = set()
        self.fair_share = FairShare()
        self.accounts = Accounts()
        # A heap of time, handle and kind.
        self._deadlines: list[tuple[float, int, DeadlineKind]] = []
        self.num_waiting = 0
        """Waiting requests, including those set aside."""
        self.waiting_tokens = 0
        """Known tokens of the waiting requests."""

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_handle.values())

    def by_handle(self, handle: int) -> Request | None:
        """Returns the live request with this handle, or None."""
        return self._by_handle.get(handle)

    def by_stream(self, frontend: str, stream: int) -> Request | None:
        """Returns the live request of this stream, or None."""
        return self._by_stream.get((frontend, stream))

    def by_request_id(self, request_id: str) -> tuple[Request, ...]:
        """Returns the live samples of the submitted request with this id, in order."""
        return tuple(self._by_id.get(request_id, ()))

    def by_frontend(self, frontend: str) -> list[Request]:
        """Returns the live requests of one front end in the order of arrival."""
        return [request for request in self if request.frontend == frontend]

    def add(self, request: Request) -> None:
        """Adds a new request and queues it."""
        self._by_handle[request.handle] = request
        self._by_stream[request.frontend, request.stream] = request
        self._by_id.setdefault(request.request_id, []).append(request)
        self.enqueue(request)

    def attach(self, request: Request, frontend: str, stream: int) -> None:
        """Gives a live request another reader."""
        del self._by_stream[request.frontend, request.stream]
        request.attach(frontend, stream)
        self._by_stream[frontend, stream] = request

    def remove(self, request: Request) -> None:
        """Removes a request that has ended."""
        self._held.discard(request.handle)
        if request.tenant:
            self._left_row(request)
            self._unpark_one(request.tenant)
        del self._by_handle[request.handle]
        del self._by_stream[request.frontend, request.stream]
        samples = self._by_id[request.request_id]
        samples.remove(request)
        if not samples:
            del self._by_id[request.request_id]
        self.fair_share.prune(len(self))

    # The queue -----------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Inserts a waiting request at its place in the order, unless it is held."""
        assert request.phase is Phase.WAITING
        if request.handle in self._held:
            self._held_waiting[request.handle] = request
        else:
            self._insert((queue_key(request), request))
        self.num_waiting += 1
        self.waiting_tokens += request.known
        if request.tenant:
            self.accounts.of(request.tenant).queues(1, request.known)
            if self._left_row(request):
                self._unpark_one(request.tenant)

    def _insert(self, entry: _Entry) -> None:
        if self._rest and (not self._front or entry > self._front[-1]):
            heapq.heappush(self._rest, entry)
            return
        insort(self._front, entry)
        if len(self._front) > WINDOW:
            heapq.heappush(self._rest, self._front.pop())

    def first(self) -> list[_Entry]:
        """Returns the first `WINDOW` waiting requests in order. The list is valid until the queue changes."""
        front, rest = self._front, self._rest
        if any(entry[1].phase is not Phase.WAITING for entry in front):
            front[:] = [entry for entry in front if entry[1].phase is Phase.WAITING]
        while rest and len(front) < WINDOW:
            entry = heapq.heappop(rest)
            if entry[1].phase is Phase.WAITING:
                front.append(entry)
        return front

    def head(self) -> Request | None:
        """Returns the first waiting request, or None if no request waits in the queue."""
        if not self.num_waiting:
            return None
        front = self._front if self._front and self._front[0][1].phase is Phase.WAITING else self.first()
        return front[0][1] if front else None

    def take(self, request: Request) -> None:
        """Removes a waiting request that is about to be admitted: one of the first `WINDOW`, or one that is held."""
        if request.handle not in self._held:
            self._remove_from_front(request)
        # A request that priority moved forward has a later start time than the requests it overtook. The virtual time
        # must not pass theirs, so it advances only to this request's queue key.
        self.fair_share.admitted(min(request.virtual_start, queue_key(request)[0]))
        self.withdraw(request)
        if request.tenant:
            request.count_row(True)
            self.accounts.of(request.tenant).takes_rows(1)

    def _left_row(self, request: Request) -> bool:
        """Counts the row that the request had as free. Returns whether it had one."""
        had_row = request.has_row
        if had_row:
            request.count_row(False)
            self.accounts.of(request.tenant).takes_rows(-1)
        return had_row

    def park(self, request: Request) -> None:
        """Takes one of the first `WINDOW` waiting requests out of the queue until its tenant may have a row."""
        self._remove_from_front(request)
        heapq.heappush(self._parked.setdefault(request.tenant, []), (queue_key(request), request))
        self._parked_handles.add(request.handle)

    def _unpark_one(self, tenant: str) -> bool:
        """Puts the tenant's first parked request back into the queue. Returns False if none is parked."""
        heap = self._parked.get(tenant)
        while heap:
            entry = heapq.heappop(heap)
            if entry[1].handle in self._parked_handles:
                self._parked_handles.discard(entry[1].handle)
                self._insert(entry)
                return True
        self._parked.pop(tenant, None)
        return False

    def unpark_all(self) -> None:
        """Puts all parked requests back, because rows or limits changed."""
        for tenant in list(self._parked):
            while self._unpark_one(tenant):
                pass

    def account_of(self, request: Request) -> Account | None:
        """Returns the account of the request's tenant; None without a token file."""
        return self.accounts.of(request.tenant) if request.tenant else None

    def _remove_from_front(self, request: Request) -> None:
        for i, entry in enumerate(self._front):
            if entry[1] is request:
                del self._front[i]
                return
        raise AssertionError(f"request {request.request_id} is not among the first {WINDOW} that wait")

    def withdraw(self, request: Request) -> None:
        """Counts a request as no longer waiting. Its entry may stay in the queue until it reaches the front."""
        self.num_waiting -= 1
        self.waiting_tokens -= request.known
        self._set_aside.pop(request.handle, None)
        self._held_waiting.pop(request.handle, None)
        if request.tenant:
            self.accounts.of(request.tenant).queues(-1, -request.known)
            self._parked_handles.discard(request.handle)
        if len(self._rest) > 2 * self.num_waiting + 64:
            self._rest[:] = [entry for entry in self._rest if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._rest)

    def set_aside(self, request: Request) -> None:
        """Takes one of the first `WINDOW` waiting requests out of the queue. It still counts as waiting."""
        self._remove_from_front(request)
        self._set_aside[request.handle] = request
        if request.tenant:
            self._unpark_one(request.tenant)

    def restore_set_aside(self) -> None:
        """Puts all requests that were set aside back into the queue."""
        for request in self._set_aside.values():
            self._insert((queue_key(request), request))
        self._set_aside.clear()

    def hold(self, request: Request) -> None:
        """Takes a live request out of the queue, now if it waits, or when it is queued again."""
        self._held.add(request.handle)
        if request.phase is Phase.WAITING:
            self._front = [entry for entry in self._front if entry[1] is not request]
            self._rest = [entry for entry in self._rest if entry[1] is not request]
            heapq.heapify(self._rest)
            self._set_aside.pop(request.handle, None)
            self._parked_handles.discard(request.handle)
            self._held_waiting[request.handle] = request
            self._unpark_one(request.tenant)

    def release(self, request: Request) -> None:
        """Puts a held request back into the queue if it waits."""
        self._held.discard(request.handle)
        if self._held_waiting.pop(request.handle, None) is not None:
            self._insert((queue_key(request), request))

    def is_held(self, request: Request) -> bool:
        """Returns whether only a trial may run the request."""
        return request.handle in self._held

    def add_pending_token(self, request: Request, token: int) -> None:
        """Appends a token to a waiting request, from the result of a plan that was in flight at its preemption."""
        request.add_outputs(np.array([token], np.int32))
        self.waiting_tokens += 1
        if request.tenant:
            self.accounts.of(request.tenant).queues(0, 1)

    def waiting(self) -> list[Request]:
        """Returns all waiting requests: those in the queue, in order, then those parked, set aside and held.

        It takes O(n log n), so only audits and rare operations call it.
        """
        queued = [entry[1] for entry in sorted(self._front + self._rest) if entry[1].phase is Phase.WAITING]
        parked = [self._by_handle[handle] for handle in sorted(self._parked_handles)]
        return [*queued, *parked, *self._set_aside.values(), *self._held_waiting.values()]

    # Deadlines -----------------------------------------------------------------------------------------------

    def add_deadline(self, at: float, request: Request, kind: DeadlineKind) -> None:
        """Adds a time at which the request ends."""
        heapq.heappush(self._deadlines, (at, request.handle, kind))

    def pop_deadline(self, now: float) -> tuple[Request, DeadlineKind] | None:
        """Removes and returns the earliest deadline if it has passed. Otherwise returns None."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1] not in self._by_handle):
            _, handle, kind = heapq.heappop(deadlines)
            request = self._by_handle.get(handle)
            if request is not None:
                return request, kind
        if len(deadlines) > 2 * len(self) + 64:
            self._deadlines = [entry for entry in deadlines if entry[1] in self._by_handle]
            heapq.heapify(self._deadlines)
        return None

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline, or None. It may belong to a request that has ended."""
        return self._deadlines[0][0] if self._deadlines else None
