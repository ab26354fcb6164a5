"""The live requests, found by handle, stream or id; the queue of those that wait; the deadlines ahead.

Owns who is live and who waits. Knows nothing of workers.
"""

import heapq
from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from scheduler_svc.core.policy import queue_key
from scheduler_svc.core.request import Phase, Request

_Entry = tuple[tuple[int, int], Request]


class Due(StrEnum):
    """What a moment ahead means for its request."""

    TIME_LIMIT = "time limit"
    DEADLINE = "deadline"


class RequestBook:
    """Every live request, exactly once."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}
        self._by_stream: dict[tuple[str, int], Request] = {}
        self._by_id: dict[str, list[Request]] = {}
        # Those that want prompt logprobs queue apart: where a step can tell no more of them, the others go on.
        self._plain: list[_Entry] = []
        self._telling: list[_Entry] = []
        self._due: list[tuple[float, int, Due]] = []
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

    # The queue -----------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Puts a waiting request in its place."""
        assert request.phase is Phase.WAITING
        heapq.heappush(self._telling if request.prompt_logprobs_from else self._plain, (queue_key(request), request))
        self.num_waiting += 1
        self.waiting_tokens += request.known

    def head(self, *, plain: bool = False) -> Request | None:
        """Whoever goes next; with `plain` those that want prompt logprobs are passed over."""
        first = _first(self._plain)
        if plain or not self._telling:
            return first[1] if first else None
        heads = [entry for entry in (first, _first(self._telling)) if entry is not None]
        return min(heads)[1] if heads else None

    def take(self, request: Request) -> None:
        """Removes a head, which is about to be admitted."""
        # What it wanted when it was queued may have been told since.
        queue = self._plain if self._plain and self._plain[0][1] is request else self._telling
        entry = heapq.heappop(queue)
        assert entry[1] is request, f"request {request.request_id} is no head of the queue"
        self.uncount(request)

    def uncount(self, request: Request) -> None:
        """Notes that a waiting request waits no longer; a dead entry may stay in the heap."""
        self.num_waiting -= 1
        self.waiting_tokens -= request.known
        if len(self._plain) + len(self._telling) > 2 * self.num_waiting + 64:
            for queue in (self._plain, self._telling):
                queue[:] = [entry for entry in queue if entry[1].phase is Phase.WAITING]
                heapq.heapify(queue)

    def add_late_output(self, request: Request, token: int) -> None:
        """Gives a waiting request a token that a plan from before its preemption brought."""
        request.add_outputs(np.array([token], np.int32))
        self.waiting_tokens += 1

    def waiting(self) -> list[Request]:
        """Who waits, next first; O(n log n), for audits and the rare look at all."""
        return [entry[1] for entry in sorted(self._plain + self._telling) if entry[1].phase is Phase.WAITING]

    # Deadlines -----------------------------------------------------------------------------------------------

    def add_due(self, at: float, request: Request, due: Due) -> None:
        """Remembers a moment at which the request ends."""
        heapq.heappush(self._due, (at, request.handle, due))

    def pop_due(self, now: float) -> tuple[Request, Due] | None:
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


def _first(queue: list[_Entry]) -> _Entry | None:
    """The queue's head, the dead before it dropped."""
    while queue and queue[0][1].phase is not Phase.WAITING:
        heapq.heappop(queue)
    return queue[0] if queue else None
