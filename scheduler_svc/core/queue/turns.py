"""The order of the waiting requests of all tenants: start-time fair queueing between tenants, counted in tokens.

Each tenant has a queue of its own (`TenantQueue`), in which priority, salts and the order of arrival count. The tenant
with the earliest turn is next. A request that gets its first row takes the tenant's next turn and moves the following
one back by the tokens that it is expected to use (`Request.expected_length`); its end corrects that. The virtual time
of the service is the least that a waiting tenant has used when a request gets a row or a tenant begins to wait. A
tenant that begins to wait counts as having used as much, so it gets no credit for idle time. Only requests that have
ended count as used: if running ones did, a tenant with short requests would wait for one with long prompts to be
computed whole, or behind reserved output that is given back. Without a token file there is one tenant, and its own
order is the order of the service.

**Turns.** A turn is a virtual start time of a tenant. Each request pays for one turn when it gets its first row. The
tenant uses its turns in the order of its own requests: if a request is preempted, its turn is free for the next one,
and if an urgent request gets a row, it takes the earliest turn of the less urgent ones, which move back by one.

**Fair share**: start-time fair queueing within the tenant, counted in tokens.

Each request gets a virtual start time, which determines its place in the queue (`order.queue_key`). The virtual time of
the service is the largest start time of the requests admitted so far. A new request starts where its tenant's previous
request finishes, but not before the virtual time of the service:

    start  = max(virtual time, finish of the tenant's previous request)
    finish = start + cost                        cost: expected number of tokens, prompt and output

The requests of a tenant with many requests therefore wait for each other, and a tenant gets no credit for idle time.
With a single tenant the order is first come, first served.

Sources: Goyal, Vin and Cheng, "Start-time fair queueing" (1996), with tags at the time of service; Sheng et al.,
"Fairness in serving large language models" (2024), for the cost in tokens.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.queue.order import WINDOW, Entry, WaitingList, queue_key
from scheduler_svc.core.state.request import Request


class FairShare:
    """The virtual time of the service and the last finish time of each tenant.

    A tenant is identified by its name in the token file. Without a token file, each `prefix_root` counts as a tenant.
    """

    def __init__(self) -> None:
        self._virtual_time = 0
        self._last_finish: dict[str | bytes, int] = {}

    def enter(self, tenant: str | bytes, cost: int) -> int:
        """Places a new request that is expected to cost `cost` tokens. Returns its virtual start time."""
        start = max(self._virtual_time, self._last_finish.get(tenant, 0))
        self._last_finish[tenant] = start + cost
        return start

    def admitted(self, virtual_start: int) -> None:
        """Advances the virtual time to the start time of an admitted request."""
        self._virtual_time = max(self._virtual_time, virtual_start)

    def prune(self, num_live: int) -> None:
        """Drops tenants to bound the memory to about two per live request.

        A tenant with a finish time in the past is equal to a new tenant, so dropping it changes nothing. If too many
        finish times are in the future (for example, because each request has a different salt), the virtual time
        advances until only a few are, and the dropped tenants are treated as new.
        """
        if len(self._last_finish) > 2 * num_live + 64:
            finishes = sorted(self._last_finish.values(), reverse=True)
            self._virtual_time = max(self._virtual_time, finishes[num_live + 32])
            self._last_finish = {
                tenant: finish for tenant, finish in self._last_finish.items() if finish > self._virtual_time
            }


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
        # The running requests in the order of their queue keys, which is also that of their turns.
        self._order: list[Entry] = []

    @property
    def used(self) -> int:
        """Virtual time of the requests that have ended."""
        return self.next_turn - self.reserved

    def turns(self, count: int = WINDOW) -> Iterator[tuple[int, Entry]]:
        """Yields the first `count` waiting requests in order, each with the turn that it would get."""
        free, following = sorted(self._free_turns), self.next_turn
        for entry in self.waiting.first(count):
            if entry[1].turn < 0:
                insort(free, following)
                following += entry[1].expected_length
            yield free.pop(0), entry

    def first_turn(self) -> int:
        """Returns the turn that the first waiting request would get."""
        return next((turn for turn, _ in self.turns()), self.next_turn)

    def began_to_wait(self, virtual_time: int) -> None:
        """Forgets unused service: a tenant without waiting requests gets no credit for this time."""
        self.next_turn += max(0, virtual_time - self.used)

    def seated(self, request: Request) -> int:
        """Gives a turn to a request that gets a row. Returns the turn that was free."""
        if request.turn < 0:
            heapq.heappush(self._free_turns, self.next_turn)
            self.next_turn += request.expected_length
            self.reserved += request.expected_length
        turn = heapq.heappop(self._free_turns)
        self.running[request.handle] = request
        entry = (queue_key(request), request)
        at = bisect_left(self._order, entry[:1])
        self._order.insert(at, entry)
        self._place_turn(at, turn)
        return turn

    def _place_turn(self, at: int, turn: int) -> None:
        """Gives a turn to the request at a place of the order. Those between it and the turn's place move by one."""
        order = self._order
        while at + 1 < len(order) and order[at + 1][1].turn < turn:
            order[at][1].turn = order[at + 1][1].turn
            at += 1
        while at > 0 and order[at - 1][1].turn > turn:
            order[at][1].turn = order[at - 1][1].turn
            at -= 1
        order[at][1].turn = turn

    def left_row(self, request: Request) -> bool:
        """Frees the turn of a request that lost its row. Returns False if it had none."""
        if self.running.pop(request.handle, None) is None:
            return False
        heapq.heappush(self._free_turns, request.turn)
        self._leave_order(request)
        return True

    def _leave_order(self, request: Request) -> None:
        at = bisect_left(self._order, (queue_key(request),))
        assert self._order[at][1] is request, f"{request.submit.request_id} is not in the order of its tenant's rows"
        del self._order[at]

    def ended(self, request: Request) -> None:
        """Removes a request and its turn, and counts the tokens that it used."""
        if request.turn < 0:
            return
        if self.running.pop(request.handle, None) is not None:
            self._leave_order(request)
        else:
            self._free_turns.remove(max(self._free_turns))
            heapq.heapify(self._free_turns)
        self.next_turn -= request.expected_length - request.known
        self.reserved -= request.expected_length


class Turns:
    """The queues of all tenants by name; '' is the only one without a token file."""

    def __init__(self) -> None:
        self.queues: dict[str, TenantQueue] = {}
        # Those with waiting requests, and some that had them before.
        self._active: dict[str, TenantQueue] = {}
        self._virtual_time = 0
        # The first requests of all tenants in order; None after a change.
        self._merged: list[Entry] | None = None
        self._num_merged = 0

    @property
    def is_shared(self) -> bool:
        """Whether several tenants had requests."""
        return len(self.queues) > 1

    def of(self, tenant: str) -> TenantQueue:
        """Returns the queue of a tenant that had a request."""
        return self.queues[tenant]

    def open(self, tenant: str) -> TenantQueue:
        """Makes the queue of a tenant at its first request. Returns it."""
        if tenant not in self.queues:
            self.queues[tenant] = TenantQueue()
        return self.queues[tenant]

    def insert(self, request: Request) -> None:
        """Queues a waiting request."""
        queue = self.of(request.submit.tenant)
        if not queue.waiting:
            self._advance()
            queue.began_to_wait(self._virtual_time)
            self._active[request.submit.tenant] = queue
        queue.waiting.insert(request)
        self._merged = None

    def first(self, count: int = WINDOW) -> list[Entry]:
        """Returns the first `count` waiting requests of all tenants in order, valid until the next change."""
        queues = self._ready()
        if len(queues) == 1:
            return queues[0].waiting.first(count)
        if self._merged is None or self._num_merged < count:
            merged = heapq.merge(*(queue.turns(count) for queue in queues), key=_by_turn)
            self._merged, self._num_merged = [entry for _, entry in islice(merged, count)], count
        return self._merged[:count]

    def head(self) -> Request | None:
        """Returns the first waiting request, or None if no request waits here."""
        queues = self._ready()
        if len(queues) == 1:
            head = queues[0].waiting.head()
            return None if head is None else head[1]
        first = self.first()
        return first[0][1] if first else None

    def _ready(self) -> list[TenantQueue]:
        """Returns the queues that a request may be taken from."""
        for tenant in [tenant for tenant, queue in self._active.items() if not queue.waiting]:
            del self._active[tenant]
        return [queue for queue in self._active.values() if not queue.is_parked]

    def take(self, request: Request) -> None:
        """Removes one of the first requests, which goes on waiting elsewhere or gets a row."""
        self._advance()
        self.of(request.submit.tenant).waiting.take(request)
        self._merged = None

    def left(self, request: Request) -> None:
        """Counts a request as gone that stopped waiting in the queue."""
        self.of(request.submit.tenant).waiting.left()
        self._merged = None

    def discard(self, request: Request) -> None:
        """Removes any waiting request. It takes O(n)."""
        self.of(request.submit.tenant).waiting.discard(request)
        self._merged = None

    def seated(self, request: Request) -> None:
        """Gives the request, which gets a row, a turn of its tenant."""
        self.of(request.submit.tenant).seated(request)
        self._merged = None

    def _advance(self) -> None:
        if queues := self._ready():
            self._virtual_time = max(self._virtual_time, min(queue.used for queue in queues))

    def left_row(self, request: Request) -> None:
        """Frees the turn of a request that may have had a row, and considers its tenant again."""
        queue = self.of(request.submit.tenant)
        if queue.left_row(request):
            self.unpark(queue)
            self._merged = None

    def ended(self, request: Request) -> None:
        """Settles the turn of a request that has ended, and considers its tenant again."""
        queue = self.of(request.submit.tenant)
        queue.ended(request)
        self.unpark(queue)
        self._merged = None

    def park(self, tenant: str) -> None:
        """Leaves the tenant out until one of its rows is free or the limits change."""
        self.of(tenant).is_parked = True
        self._merged = None

    def unpark(self, queue: TenantQueue) -> None:
        """Considers a parked tenant again. What it did not get meanwhile is lost to it."""
        if queue.is_parked:
            queue.is_parked = False
            self._advance()
            queue.began_to_wait(self._virtual_time)
            self._merged = None

    def all(self) -> Iterator[Request]:
        """Yields all requests of all queues, each queue in order. It takes O(n log n)."""
        for queue in self.queues.values():
            yield from queue.waiting.all()


def _by_turn(item: tuple[int, Entry]) -> tuple[int, int]:
    turn, (_, request) = item
    return turn, request.handle
