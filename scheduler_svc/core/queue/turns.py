"""One tenant's requests: the order of those that wait, the turns that the tenant has paid for, how its salts share.

The key of a request never changes, so a preempted request returns to its old place.

**Turns.** A turn is a virtual start time of a tenant. Each request pays for one turn when it gets its first row. The
tenant uses its turns in the order of its own requests: if a request is preempted, its turn is free for the next one,
and if an urgent request gets a row, it takes the earliest turn of the less urgent ones, which move back by one.
`request_queue` compares the turns of tenants.

**Fair share**: start-time fair queueing between the salts of the tenant, counted in tokens.

Each request gets a virtual start time, which determines its place in the queue (`queue_key`). The tenant's virtual time
is the largest start time of its requests admitted so far. A new request starts where the previous request of its salt
finishes, but not before the virtual time:

    start  = max(virtual time, finish of the salt's previous request)
    finish = start + cost                        cost: expected number of tokens, prompt and output

The requests of a salt with many requests therefore wait for each other, and a salt gets no credit for idle time. With
a single salt, or without `Policy.fair_share`, the order is first come, first served.

Sources: Goyal, Vin and Cheng, "Start-time fair queueing" (1996), with tags at the time of service; Sheng et al.,
"Fairness in serving large language models" (2024), for the cost in tokens.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.state.request import Request

AGEING_TOKENS = 65_536
"""Virtual time that one step of priority is worth. It is finite, so requests of low priority do not starve."""
WINDOW = 32
"""Number of waiting requests, from the head of the queue, that the plan of one lane looks at."""

QueueKey = tuple[int, int]
Entry = tuple[QueueKey, Request]
"""A request with its `queue_key`."""


def queue_key(request: Request) -> QueueKey:
    """Returns the request's sort key among the requests of its tenant. The smallest key goes first."""
    return (request.virtual_start - request.submit.priority * AGEING_TOKENS, request.handle)


def running_key(request: Request) -> tuple[int, int, int]:
    """Returns the sort key of a running request among all: its turn, then its `queue_key`.

    Without a token file there is one tenant, so its queue keys alone give the order.
    """
    submit = request.submit
    turn = request.turn if submit.tenant else 0
    return (turn, request.virtual_start - submit.priority * AGEING_TOKENS, request.handle)


def trial_key(request: Request) -> QueueKey:
    """Returns the key by which waiting requests of all tenants are compared with the suspects of a trial.

    The queue keys of two tenants say nothing about each other, so with a token file the order of arrival counts.
    """
    return (request.handle, 0) if request.submit.tenant else queue_key(request)


def drop(entries: list[Entry], request: Request) -> bool:
    """Removes a request from a list in order. Returns whether it was there."""
    at = bisect_left(entries, (queue_key(request),))
    is_there = at < len(entries) and entries[at][1] is request
    if is_there:
        del entries[at]
    return is_there


class FairShare:
    """The virtual time of one tenant and the last finish time of each of its shares.

    A share is the requests with one `prefix_root`, which tenant and salt decide; without `Policy.fair_share`, all.
    """

    def __init__(self) -> None:
        self._virtual_time = 0
        self._last_finish: dict[str | bytes, int] = {}

    def enter(self, share: str | bytes, cost: int) -> int:
        """Places a new request that is expected to cost `cost` tokens. Returns its virtual start time."""
        start = max(self._virtual_time, self._last_finish.get(share, 0))
        self._last_finish[share] = start + cost
        return start

    def admitted(self, virtual_start: int) -> None:
        """Advances the virtual time to the start time of an admitted request."""
        self._virtual_time = max(self._virtual_time, virtual_start)

    def prune(self, num_live: int) -> None:
        """Drops shares to bound the memory to about two per live request.

        A share with a finish time in the past is equal to a new one, so dropping it changes nothing. If too many
        finish times are in the future (for example, because each request has a different salt), the virtual time
        advances until only a few are, and the dropped shares are treated as new.
        """
        if len(self._last_finish) > 2 * num_live + 64:
            finishes = sorted(self._last_finish.values(), reverse=True)
            self._virtual_time = max(self._virtual_time, finishes[num_live + 32])
            self._last_finish = {
                share: finish for share, finish in self._last_finish.items() if finish > self._virtual_time
            }


class TenantQueue:
    """The requests of one tenant."""

    def __init__(self) -> None:
        self.waiting: list[Entry] = []
        """In order."""
        self.fair_share = FairShare()
        """Divides the tenant's share between its salts."""
        self.is_parked = False
        """Whether the tenant has all rows of its `row_share`."""
        self.running: list[Entry] = []
        """The requests with a row in the order of their queue keys, which is also that of their turns."""
        self.next_turn = 0
        """Virtual start time of the next turn that a request pays for."""
        self.reserved = 0
        """Tokens of the turns of requests that have not ended."""
        # A heap of the turns that were paid for and are free: one for each waiting request that had a row before.
        self._free_turns: list[int] = []

    @property
    def used(self) -> int:
        """Virtual time of the requests that have ended."""
        return self.next_turn - self.reserved

    def turns(self, count: int = WINDOW) -> Iterator[tuple[int, Entry]]:
        """Yields the first `count` waiting requests in order, each with the turn that it would get."""
        free, following = sorted(self._free_turns), self.next_turn
        for entry in self.waiting[:count]:
            if entry[1].turn < 0:
                insort(free, following)
                following += entry[1].expected_length
            yield free.pop(0), entry

    def began_to_wait(self, virtual_time: int) -> None:
        """Forgets unused service: a tenant without waiting requests gets no credit for this time."""
        self.next_turn += max(0, virtual_time - self.used)

    def seated(self, request: Request) -> None:
        """Gives a turn to a request that gets a row."""
        if request.turn < 0:
            heapq.heappush(self._free_turns, self.next_turn)
            self.next_turn += request.expected_length
            self.reserved += request.expected_length
        turn, running, entry = heapq.heappop(self._free_turns), self.running, (queue_key(request), request)
        at = bisect_left(running, entry[:1])
        running.insert(at, entry)
        # The turns between its place and the turn's move by one.
        while at + 1 < len(running) and running[at + 1][1].turn < turn:
            running[at][1].turn = running[at + 1][1].turn
            at += 1
        while at > 0 and running[at - 1][1].turn > turn:
            running[at][1].turn = running[at - 1][1].turn
            at -= 1
        running[at][1].turn = turn

    def left_row(self, request: Request) -> bool:
        """Frees the turn of a request that lost its row. Returns False if it had none."""
        had_row = drop(self.running, request)
        if had_row:
            heapq.heappush(self._free_turns, request.turn)
        return had_row

    def ended(self, request: Request) -> None:
        """Removes a request and its turn, and counts the tokens that it used."""
        if request.turn < 0:
            return
        if not drop(self.running, request):
            self._free_turns.remove(max(self._free_turns))
            heapq.heapify(self._free_turns)
        self.next_turn -= request.expected_length - request.known
        self.reserved -= request.expected_length
