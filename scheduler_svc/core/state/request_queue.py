"""The live requests, found by handle, stream or id; the queue of those that wait; the deadlines ahead.

Owns who is live, who waits and whose turn it is. Knows nothing of workers.
"""

import heapq
from bisect import insort
from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

import numpy as np

from scheduler_svc.core.state.fair_share import FairShare
from scheduler_svc.core.state.request import Phase, Request

AGEING_TOKENS = 65_536
"""A step of priority is worth so many tokens of service: later requests of that priority go first until they add up to
so much. Nothing starves."""
WINDOW = 32
"""Waiting requests that are looked at when one is to be admitted."""


class Schedulable(Protocol):
    """What policy may look at."""

    @property
    def priority(self) -> int:
        """Higher goes first."""
        ...

    @property
    def virtual_start(self) -> int:
        """Tokens of service after which it is its tenant's turn (`tenants.py`)."""
        ...

    @property
    def arrival(self) -> int:
        """The core's running count of admitted requests; unique."""
        ...


def queue_key(request: Schedulable) -> tuple[int, int]:
    """Smallest first: by turn, with a head start for priority, then by arrival.

    It never changes, and a preempted request keeps it, so it goes back ahead of those that came later.
    """
    return (request.virtual_start - request.priority * AGEING_TOKENS, request.arrival)


_Entry = tuple[tuple[int, int], Request]


class DeadlineKind(StrEnum):
    """What a moment ahead means for its request."""

    TIME_LIMIT = "time limit"
    DEADLINE = "deadline"
    WORKER_WAIT = "worker wait"


class RequestQueue:
    """Every live request, exactly once."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}
        self._by_stream: dict[tuple[str, int], Request] = {}
        self._by_id: dict[str, list[Request]] = {}
        # The first in order, all of them before any of the rest, which is a heap.
        self._front: list[_Entry] = []
        self._rest: list[_Entry] = []
        self._set_aside: dict[int, Request] = {}
        self.fair_share = FairShare()
        self._due: list[tuple[float, int, DeadlineKind]] = []
        self.num_waiting = 0
        self.waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_handle.values())

    def by_handle(self, handle: int) -> Request | None:
        """The live request with this handle."""
        return self._by_handle.get(handle)

    def by_stream(self, frontend: str, stream: int) -> Request | None:
        """The live request of this stream."""
        return self._by_stream.get((frontend, stream))

    def of_id(self, request_id: str) -> tuple[Request, ...]:
        """The live requests with this id: samples of one submitted request, in order."""
        return tuple(self._by_id.get(request_id, ()))

    def of_frontend(self, frontend: str) -> list[Request]:
        """Live requests of one front end, in order of admission."""
        return [request for request in self if request.frontend == frontend]

    def add(self, request: Request) -> None:
        """Takes in a new request and queues it."""
        self._by_handle[request.handle] = request
        self._by_stream[request.frontend, request.stream] = request
        self._by_id.setdefault(request.request_id, []).append(request)
        self.enqueue(request)

    def remove(self, request: Request) -> None:
        """Forgets a request that ended; the queue's entry, if any, is dropped when it comes up."""
        del self._by_handle[request.handle]
        del self._by_stream[request.frontend, request.stream]
        samples = self._by_id[request.request_id]
        samples.remove(request)
        if not samples:
            del self._by_id[request.request_id]
        self.fair_share.prune(len(self))

    # The queue -----------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Puts a waiting request in its place."""
        assert request.phase is Phase.WAITING
        self._place((queue_key(request), request))
        self.num_waiting += 1
        self.waiting_tokens += request.known

    def _place(self, entry: _Entry) -> None:
        if self._rest and (not self._front or entry > self._front[-1]):
            heapq.heappush(self._rest, entry)
            return
        insort(self._front, entry)
        if len(self._front) > WINDOW:
            heapq.heappush(self._rest, self._front.pop())

    def first(self) -> list[_Entry]:
        """The first `WINDOW` that wait, next first; only until the queue changes."""
        front, rest = self._front, self._rest
        if any(entry[1].phase is not Phase.WAITING for entry in front):
            front[:] = [entry for entry in front if entry[1].phase is Phase.WAITING]
        while rest and len(front) < WINDOW:
            entry = heapq.heappop(rest)
            if entry[1].phase is Phase.WAITING:
                front.append(entry)
        return front

    def head(self) -> Request | None:
        """Whoever goes next."""
        front = self._front if self._front and self._front[0][1].phase is Phase.WAITING else self.first()
        return front[0][1] if front else None

    def take(self, request: Request) -> None:
        """Removes one of the first, which is about to be admitted."""
        self._drop(request)
        # A head start is not service that its tenant has had: what the tenant has waiting from before stands behind it.
        self.fair_share.admitted(min(request.virtual_start, queue_key(request)[0]))
        self.uncount(request)

    def _drop(self, request: Request) -> None:
        for i, entry in enumerate(self._front):
            if entry[1] is request:
                del self._front[i]
                return
        raise AssertionError(f"request {request.request_id} is none of the first that wait")

    def uncount(self, request: Request) -> None:
        """Notes that a waiting request waits no longer; a dead entry may stay in the queue."""
        self.num_waiting -= 1
        self.waiting_tokens -= request.known
        self._set_aside.pop(request.handle, None)
        if len(self._rest) > 2 * self.num_waiting + 64:
            self._rest[:] = [entry for entry in self._rest if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._rest)

    def set_aside(self, request: Request) -> None:
        """Puts one of the first aside: no worker that serves can run it. It waits, in nobody's way, for another."""
        self._drop(request)
        self._set_aside[request.handle] = request

    def restore_set_aside(self) -> None:
        """Another worker serves: back into the queue with those who were put aside."""
        for request in self._set_aside.values():
            self._place((queue_key(request), request))
        self._set_aside.clear()

    def add_pending_token(self, request: Request, token: int) -> None:
        """Gives a waiting request a token that a plan from before its preemption brought."""
        request.add_outputs(np.array([token], np.int32))
        self.waiting_tokens += 1

    def waiting(self) -> list[Request]:
        """Who waits, next first, then who was put aside; O(n log n), for audits and the rare look at all."""
        queued = [entry[1] for entry in sorted(self._front + self._rest) if entry[1].phase is Phase.WAITING]
        return queued + list(self._set_aside.values())

    # Deadlines -----------------------------------------------------------------------------------------------

    def add_due(self, at: float, request: Request, due: DeadlineKind) -> None:
        """Remembers a moment at which the request ends."""
        heapq.heappush(self._due, (at, request.handle, due))

    def pop_due(self, now: float) -> tuple[Request, DeadlineKind] | None:
        """The earliest live request whose moment has come."""
        due = self._due
        while due and (due[0][0] <= now or due[0][1] not in self._by_handle):
            _, handle, what = heapq.heappop(due)
            request = self._by_handle.get(handle)
            if request is not None:
                return request, what
        if len(due) > 2 * len(self) + 64:
            self._due = [entry for entry in due if entry[1] in self._by_handle]
            heapq.heapify(self._due)
        return None

    def next_due(self) -> float | None:
        """When the next moment may come; may be early, never late."""
        return self._due[0][0] if self._due else None
