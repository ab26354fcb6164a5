"""The order of the waiting requests of all tenants: start-time fair queueing between tenants, counted in tokens.

Each tenant has a queue of its own (`tenant_queue`), in which priority, salts and the order of arrival count. The tenant
with the earliest turn is next. A request that gets its first row takes the tenant's next turn and moves the following
one back by its largest number of tokens; when it ends, the tokens that it did not use are given back. The virtual time
of the service is the least that a waiting tenant has used when a request gets a row or a tenant begins to wait. A
tenant that begins to wait counts as having used as much, so it gets no credit for idle time. Only requests that have
ended count as used: if running ones did, a tenant with short requests would wait for one with long prompts to be
computed whole, or behind reserved output that is given back. Without a token file there is one tenant, and its own
order is the order of the service.

Sources: Goyal, Vin and Cheng, "Start-time fair queueing" (1996), with tags at the time of service; Sheng et al.,
"Fairness in serving large language models" (2024), for the cost in tokens.
"""

import heapq
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.queue.order import Entry
from scheduler_svc.core.queue.tenant_queue import TenantQueue
from scheduler_svc.core.queue.waiting_list import WINDOW
from scheduler_svc.core.state.request import Request


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
        """Returns the queue of a tenant. There are as many as tenants had requests."""
        queue = self.queues.get(tenant)
        if queue is None:
            queue = self.queues[tenant] = TenantQueue()
        return queue

    def insert(self, request: Request) -> None:
        """Queues a waiting request."""
        queue = self.of(request.tenant)
        if not queue.waiting:
            self._advance()
            queue.began_to_wait(self._virtual_time)
            self._active[request.tenant] = queue
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
        self.of(request.tenant).waiting.take(request)
        self._merged = None

    def left(self, request: Request) -> None:
        """Counts a request as gone that stopped waiting in the queue."""
        self.of(request.tenant).waiting.left()
        self._merged = None

    def discard(self, request: Request) -> None:
        """Removes any waiting request. It takes O(n)."""
        self.of(request.tenant).waiting.discard(request)
        self._merged = None

    def seated(self, request: Request) -> None:
        """Gives the request, which gets a row, a turn of its tenant."""
        self.of(request.tenant).seated(request)
        self._merged = None

    def _advance(self) -> None:
        if queues := self._ready():
            self._virtual_time = max(self._virtual_time, min(queue.used for queue in queues))

    def left_row(self, request: Request) -> None:
        """Frees the turn of a request that may have had a row, and considers its tenant again."""
        queue = self.of(request.tenant)
        if queue.left_row(request):
            self.unpark(queue)
            self._merged = None

    def ended(self, request: Request) -> None:
        """Settles the turn of a request that has ended, and considers its tenant again."""
        queue = self.of(request.tenant)
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
    return turn, request.arrival
