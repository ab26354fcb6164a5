"""One tenant's share of the service: its waiting and running requests, and the turns that it has paid for.

A turn is a virtual start time of the tenant (`turns`). Each request pays for one turn when it gets its first row. The
tenant uses its turns in the order of its own requests: if a request is preempted, its turn is free for the next one,
and if an urgent request gets a row, it takes the earliest turn of the less urgent ones, which move back by one.
"""

import heapq
from bisect import insort
from collections.abc import Iterator

from scheduler_svc.core.queue.fair_share import FairShare
from scheduler_svc.core.queue.order import Entry, QueueKey, queue_key
from scheduler_svc.core.queue.waiting_list import WaitingList
from scheduler_svc.core.state.request import Request

_NO_KEY: QueueKey = (-(1 << 62), 0)


class TenantQueue:
    """The requests of one tenant."""

    def __init__(self) -> None:
        self.waiting = WaitingList()
        self.fair_share = FairShare()
        """Divides the tenant's share between its salts."""
        self.is_parked = False
        """Whether the tenant has all rows of its `row_share`."""
        self.running: dict[int, Request] = {}
        """The requests with a row, by handle."""
        self.next_turn = 0
        """Virtual start time of the next turn that a request pays for."""
        self.reserved = 0
        """Tokens of the turns of requests that have not ended."""
        # A heap of the turns that were paid for and are free: one for each waiting request that had a row before.
        self._free_turns: list[int] = []
        # No running request has a larger queue key or a later turn.
        self._last_key, self._last_turn = _NO_KEY, 0

    @property
    def used(self) -> int:
        """Virtual time of the requests that have ended."""
        return self.next_turn - self.reserved

    def turns(self) -> Iterator[tuple[int, Entry]]:
        """Yields the first waiting requests in order, each with the turn that it would get."""
        free, following = sorted(self._free_turns), self.next_turn
        for entry in self.waiting.first():
            if entry[1].turn < 0:
                insort(free, following)
                following += entry[1].total_length
            yield free.pop(0), entry

    def first_turn(self) -> int:
        """Returns the turn that the first waiting request would get."""
        return next((turn for turn, _ in self.turns()), self.next_turn)

    def began_to_wait(self, virtual_time: int) -> None:
        """Forgets unused service: a tenant without waiting requests gets no credit for this time."""
        self.next_turn += max(0, virtual_time - self.used)

    def seated(self, request: Request) -> int:
        """Gives a turn to a request that gets a row. Returns the turn."""
        if request.turn < 0:
            heapq.heappush(self._free_turns, self.next_turn)
            self.next_turn += request.total_length
            self.reserved += request.total_length
        turn = heapq.heappop(self._free_turns)
        key = queue_key(request)
        self.running[request.handle] = request
        request.take_turn(turn)
        if key < self._last_key or turn < self._last_turn:
            self._sort_turns()
        self._last_key, self._last_turn = max(key, self._last_key), max(turn, self._last_turn)
        return turn

    def _sort_turns(self) -> None:
        """Gives the turns of the running requests to them in the order of their keys."""
        requests = sorted(self.running.values(), key=queue_key)
        for request, turn in zip(requests, sorted(request.turn for request in requests), strict=True):
            request.take_turn(turn)

    def left_row(self, request: Request) -> bool:
        """Frees the turn of a request that lost its row. Returns False if it had none."""
        if self.running.pop(request.handle, None) is None:
            return False
        heapq.heappush(self._free_turns, request.turn)
        self._forget_last()
        return True

    def _forget_last(self) -> None:
        if not self.running:
            self._last_key, self._last_turn = _NO_KEY, 0

    def ended(self, request: Request) -> None:
        """Removes a request and its turn, and gives back the tokens that it did not use."""
        if request.turn < 0:
            return
        if self.running.pop(request.handle, None) is None:
            self._free_turns.remove(max(self._free_turns))
            heapq.heapify(self._free_turns)
        self._forget_last()
        self.next_turn -= request.total_length - request.known
        self.reserved -= request.total_length
