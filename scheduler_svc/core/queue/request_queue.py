"""All live requests, and the queue of those that wait: start-time fair queueing between tenants, counted in tokens.

Requests wait in one queue and are not assigned to a lane. Each tenant has its own order (`turns`). The tenant with the
earliest turn is next. A request that gets its first row takes the tenant's next turn and moves the following one back
by the tokens that it is expected to use (`Request.expected_length`); its end corrects that. The virtual time of the
service is the least that a waiting tenant has used when a request gets a row or a tenant begins to wait. A tenant that
begins to wait counts as having used as much, so it gets no credit for idle time. Only requests that have ended count as
used: if running ones did, a tenant with short requests would wait for one with long prompts to be computed whole, or
behind reserved output that is given back. Without a token file there is one tenant, "", and its own order is the order
of the service.

**Set aside.** A request that no present worker can hold is taken out of the queue, so that it does not block those
behind it. It goes back when another worker is proven, or when the last worker is lost.

**Parked.** A tenant with all rows of its `row_share` is left out of the queue until one of them is free.

**Held.** A suspect (`suspicion/suspects.py`) is taken out of the queue until it is cleared. Only its trial admits it.
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from scheduler_svc.core.queue.quotas import Account, Accounts, DrainRate
from scheduler_svc.core.queue.turns import WINDOW, Entry, TenantQueue, drop, queue_key
from scheduler_svc.core.state.request import Phase, Request

What = TypeVar("What")


class DeadlineKind(StrEnum):
    """Why a request ends at a deadline: the end of one of its times."""

    TIME_LIMIT = "time limit"
    DEADLINE = "deadline"
    WORKER_WAIT = "worker wait"
    QUEUE_TIME = "queue time"


class ExpiryHeap(Generic[What]):
    """A heap of time, number and what is due then. An entry that is not live is dropped when it is the earliest."""

    def __init__(self, is_live: Callable[[tuple[float, int, What]], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, What]] = []

    def add(self, at: float, number: int, what: What) -> None:
        """Adds what is due at a time on the core's clock. Numbers decide between equal times."""
        heapq.heappush(self._heap, (at, number, what))

    def pop(self, now: float, num_live: int) -> tuple[float, int, What] | None:
        """Removes and returns the earliest live entry if its time has passed. Otherwise returns None."""
        heap = self._heap
        while heap and (heap[0][0] <= now or not self._is_live(heap[0])):
            entry = heapq.heappop(heap)
            if self._is_live(entry):
                return entry
        if len(heap) > 2 * num_live + 64:
            self._heap = list(filter(self._is_live, heap))
            heapq.heapify(self._heap)
        return None

    def next(self) -> float | None:
        """Returns the earliest time, or None. Its entry may be dropped."""
        return self._heap[0][0] if self._heap else None


class RequestQueue:
    """All live requests. Iteration and `len` include the running ones."""

    def __init__(self) -> None:
        by_handle: dict[int, Request] = {}
        self._by_handle, self.by_handle = by_handle, by_handle.get
        """`by_handle` returns the live request with a handle, or None."""
        self._by_stream: dict[tuple[str, int], Request] = {}
        self._by_id: dict[str, list[Request]] = {}
        self.tenants: dict[str, TenantQueue] = {}
        """All tenants that had requests; others read them."""
        # Those with waiting requests, and some that had them before.
        self._active: dict[str, TenantQueue] = {}
        self._virtual_time = 0
        # The first requests of several tenants in order, and how many were asked for; None after a change.
        self._merged: list[Entry] | None = None
        self._num_merged = 0
        self._set_aside: dict[int, Request] = {}
        # Handles of the requests that are held, and those of them that wait.
        self._held: set[int] = set()
        self._held_waiting: dict[int, Request] = {}
        self._deadlines = ExpiryHeap[DeadlineKind](lambda due: due[1] in by_handle)
        self.accounts = Accounts()
        self.drain = DrainRate()
        self.num_waiting = 0
        """Waiting requests, including those set aside."""
        self.waiting_tokens = 0
        """Known tokens of the waiting requests."""

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_handle.values())

    def by_stream(self, frontend: str, stream: int) -> Request | None:
        """Returns the live request of this stream, or None."""
        return self._by_stream.get((frontend, stream))

    def by_request_id(self, request_id: str) -> tuple[Request, ...]:
        """Returns the live samples of the submitted request with this id, in order."""
        return tuple(self._by_id.get(request_id, ()))

    def add(self, request: Request) -> None:
        """Adds a new request and queues it."""
        self._open(request.submit.tenant)
        if request.submit.tenant:
            self.accounts.open(request.submit.tenant, request.arrived_at)
        self._by_handle[request.handle] = request
        self._by_stream[request.frontend, request.stream] = request
        self._by_id.setdefault(request.submit.request_id, []).append(request)
        self.enqueue(request)

    def attach(self, request: Request, frontend: str, stream: int) -> None:
        """Gives a live request another reader."""
        del self._by_stream[request.frontend, request.stream]
        request.frontend, request.stream = frontend, stream
        self._by_stream[frontend, stream] = request

    def remove(self, request: Request) -> None:
        """Removes a request that has ended. Its tenant is considered again."""
        self._held.discard(request.handle)
        tenant = self.tenants[request.submit.tenant]
        tenant.ended(request)
        self._unpark(tenant)
        self._merged = None
        del self._by_handle[request.handle]
        del self._by_stream[request.frontend, request.stream]
        samples = self._by_id[request.submit.request_id]
        samples.remove(request)
        if not samples:
            del self._by_id[request.submit.request_id]
        tenant.fair_share.prune(len(self))

    def enter(self, tenant: str, share: bytes, cost: int) -> int:
        """Places a new request among its tenant's: `share` is its part, by salt. Returns its virtual start time."""
        return self._open(tenant).fair_share.enter(share, cost)

    def _open(self, tenant: str) -> TenantQueue:
        if tenant not in self.tenants:
            self.tenants[tenant] = TenantQueue()
        return self.tenants[tenant]

    def enqueue(self, request: Request) -> None:
        """Inserts a waiting request, which may have had a row, at its place in the order, unless it is held."""
        assert request.phase is Phase.WAITING
        tenant = self.tenants[request.submit.tenant]
        if tenant.left_row(request):
            self._unpark(tenant)
            self._merged = None
        if request.handle in self._held:
            self._held_waiting[request.handle] = request
        else:
            self._insert(request)
        self._count(request, 1, request.known)

    def _insert(self, request: Request) -> None:
        tenant = self.tenants[request.submit.tenant]
        if not tenant.waiting:
            self._advance()
            tenant.began_to_wait(self._virtual_time)
            self._active[request.submit.tenant] = tenant
        insort(tenant.waiting, (queue_key(request), request))
        self._merged = None

    def _drop(self, request: Request) -> None:
        """Takes a request out of its tenant's order."""
        was_waiting = drop(self.tenants[request.submit.tenant].waiting, request)
        assert was_waiting, f"request {request.submit.request_id} does not wait in the queue"
        self._merged = None

    def _count(self, request: Request, count: int, tokens: int) -> None:
        self.num_waiting += count
        self.waiting_tokens += tokens
        if request.submit.tenant:
            self.accounts.of(request.submit.tenant).queues(count, tokens)

    def _ready(self) -> list[TenantQueue]:
        """Returns the queues that a request may be taken from."""
        for name in [name for name, tenant in self._active.items() if not tenant.waiting]:
            del self._active[name]
        return [tenant for tenant in self._active.values() if not tenant.is_parked]

    def _advance(self) -> None:
        if tenants := self._ready():
            self._virtual_time = max(self._virtual_time, min(tenant.used for tenant in tenants))

    def first(self, count: int = WINDOW) -> list[Entry]:
        """Returns the first `count` waiting requests of all tenants in order."""
        tenants = self._ready()
        if len(tenants) == 1:
            return tenants[0].waiting[:count]
        if self._merged is None or self._num_merged < count:
            turns = (tenant.turns(count) for tenant in tenants)
            merged = heapq.merge(*turns, key=lambda item: (item[0], item[1][1].handle))
            self._merged, self._num_merged = [entry for _, entry in islice(merged, count)], count
        return self._merged[:count]

    def head(self) -> Request | None:
        """Returns the first waiting request, or None if no request waits in the queue."""
        first = self.first() if self.num_waiting else ()
        return first[0][1] if first else None

    def take(self, request: Request, now: float) -> None:
        """Removes a waiting request that is about to be admitted: one of the `first`, or one that is held."""
        if request.handle in self._held:
            self._held_waiting.pop(request.handle, None)
        else:
            self._advance()
            self._drop(request)
        # A request that priority moved forward has a later start time than the requests it overtook. The virtual time
        # must not pass theirs, so it advances only to this request's queue key.
        tenant = self.tenants[request.submit.tenant]
        tenant.fair_share.admitted(min(request.virtual_start, queue_key(request)[0]))
        tenant.seated(request)
        self._merged = None
        self.drain.record(now, request.known)
        if request.submit.tenant:
            self.accounts.of(request.submit.tenant).drain.record(now, request.known)
        self._count(request, -1, -request.known)

    def park(self, tenant: str) -> None:
        """Leaves a tenant out until one of its rows is free, or `unpark_all` is called."""
        self.tenants[tenant].is_parked = True
        self._merged = None

    def _unpark(self, tenant: TenantQueue) -> None:
        """Considers a tenant again. What it did not get while it was parked is lost to it."""
        if tenant.is_parked:
            tenant.is_parked = False
            self._advance()
            tenant.began_to_wait(self._virtual_time)
            self._merged = None

    def unpark_all(self) -> None:
        """Considers all tenants again, because rows or limits changed."""
        for tenant in self.tenants.values():
            self._unpark(tenant)

    def account_of(self, request: Request) -> Account | None:
        """Returns the account of the request's tenant; None without a token file."""
        return self.accounts.of(request.submit.tenant) if request.submit.tenant else None

    def may_take_row(self, request: Request, num_rows: int) -> bool:
        """Returns whether the request's tenant may have another one of all `num_rows` rows. One is always allowed."""
        account, running = self.account_of(request), self.tenants[request.submit.tenant].running
        share = None if account is None else account.limits.row_share
        return share is None or len(running) < max(1, int(share * num_rows))

    def withdraw(self, request: Request) -> None:
        """Removes a request that waits no longer."""
        is_elsewhere = self._set_aside.pop(request.handle, None) or self._held_waiting.pop(request.handle, None)
        if is_elsewhere is None:
            self._drop(request)
        self._count(request, -1, -request.known)

    def set_aside(self, request: Request) -> None:
        """Takes one of the `first` waiting requests out of the queue. It still counts as waiting."""
        self._advance()
        self._drop(request)
        self._set_aside[request.handle] = request

    def restore_set_aside(self) -> None:
        """Puts all requests that were set aside back into the queue."""
        for request in self._set_aside.values():
            self._insert(request)
        self._set_aside.clear()

    def hold(self, request: Request) -> None:
        """Takes a live request out of the queue, now if it waits, or when it is queued again."""
        is_queued = request.phase is Phase.WAITING and request.handle not in self._held
        self._held.add(request.handle)
        if is_queued:
            if self._set_aside.pop(request.handle, None) is None:
                self._drop(request)
            self._held_waiting[request.handle] = request

    def release(self, request: Request) -> None:
        """Puts a held request back into the queue if it waits."""
        self._held.discard(request.handle)
        if self._held_waiting.pop(request.handle, None) is not None:
            self._insert(request)

    def is_held(self, request: Request) -> bool:
        """Returns whether only a trial may run the request."""
        return request.handle in self._held

    def add_pending_token(self, request: Request, token: int) -> None:
        """Appends a token to a waiting request, from the result of a plan that was in flight at its preemption."""
        request.add_outputs(np.array([token], np.int32))
        self._count(request, 0, 1)

    def waiting(self) -> list[Request]:
        """Returns all waiting requests: those in the queue, by tenant in order, then those set aside and held."""
        queued = [request for tenant in self.tenants.values() for _, request in tenant.waiting]
        return [*queued, *self._set_aside.values(), *self._held_waiting.values()]

    def add_deadline(self, at: float, request: Request, kind: DeadlineKind) -> None:
        """Adds a time on the core's clock at which the request ends."""
        self._deadlines.add(at, request.handle, kind)

    def pop_deadline(self, now: float) -> tuple[Request, DeadlineKind, float] | None:
        """Removes and returns the earliest deadline, with its time, if it has passed. Otherwise returns None."""
        due = self._deadlines.pop(now, len(self))
        return None if due is None else (self._by_handle[due[1]], due[2], due[0])

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline on the core's clock, or None. It may belong to a request that has ended."""
        return self._deadlines.next()


def audit_tenants(queue: RequestQueue) -> None:
    """Checks waiting requests, their tokens, rows and turns of all tenants."""
    waiting, tokens, reserved = Counter[str](), Counter[str](), Counter[str]()
    running: dict[str, set[int]] = {}
    for request in queue:
        reserved[request.submit.tenant] += request.expected_length if request.turn >= 0 else 0
        if request.phase is Phase.WAITING:
            waiting[request.submit.tenant] += 1
            tokens[request.submit.tenant] += request.known
        else:
            assert request.turn >= 0, f"{request.submit.request_id} runs without a turn"
            running.setdefault(request.submit.tenant, set()).add(request.handle)
    for name, account in queue.accounts.items():
        counted, actual = (account.waiting, account.waiting_tokens), (waiting[name], tokens[name])
        assert counted == actual, f"tenant {name!r}: waiting and tokens are counted as {counted}, but are {actual}"
    for name, tenant in queue.tenants.items():
        rows = {request.handle for _, request in tenant.running}
        assert rows == running.get(name, set()), f"tenant {name!r}: its rows are {rows}"
        assert tenant.reserved == reserved[name], f"tenant {name!r}: {tenant.reserved} tokens are reserved"
        assert tenant.used >= 0, f"tenant {name!r} has used {tenant.used} tokens"
