"""The order of requests of several tenants, compared with an order that is computed from scratch for every request."""

import random
from collections import defaultdict
from dataclasses import dataclass, field

from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.queue.turns import WINDOW, queue_key
from scheduler_svc.core.state.request import Move, Request
from tests.scheduler_svc.core.bare import bare_request

TENANTS = ("a", "b", "c")


@dataclass
class Oracle:
    """Start-time fair queueing, from its definition: every choice looks at all requests."""

    virtual_time: int = 0
    next_turn: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    free: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    waiting: list[Request] = field(default_factory=list[Request])
    running: dict[int, tuple[Request, int]] = field(default_factory=dict[int, tuple[Request, int]])
    # Live requests that have paid, by handle.
    paid: dict[int, Request] = field(default_factory=dict[int, Request])

    def add(self, request: Request) -> None:
        if not any(other.submit.tenant == request.submit.tenant for other in self.waiting):
            self.advance()
            self.next_turn[request.submit.tenant] += max(0, self.virtual_time - self.used(request.submit.tenant))
        self.waiting.append(request)

    def used(self, tenant: str) -> int:
        return self.next_turn[tenant] - sum(
            one.total_length for one in self.paid.values() if one.submit.tenant == tenant
        )

    def advance(self) -> None:
        if self.waiting:
            self.virtual_time = max(self.virtual_time, min(self.used(one.submit.tenant) for one in self.waiting))

    def order(self) -> list[Request]:
        turns: list[tuple[tuple[int, int], Request]] = []
        for tenant in {request.submit.tenant for request in self.waiting}:
            free, following = sorted(self.free[tenant]), self.next_turn[tenant]
            keys: list[tuple[int, int]] = []
            own = sorted((one for one in self.waiting if one.submit.tenant == tenant), key=queue_key)
            for request in own:
                if request.handle not in self.paid:
                    free = sorted([*free, following])
                    following += request.total_length
                keys.append((free.pop(0), request.handle))
            # A request never goes before an earlier one of its tenant.
            for i in range(1, len(keys)):
                keys[i] = max(keys[i], keys[i - 1])
            turns += zip(keys, own, strict=True)
        return [request for _, request in sorted(turns, key=lambda item: item[0])]

    def take(self, request: Request) -> None:
        tenant = request.submit.tenant
        self.advance()
        self.waiting.remove(request)
        if request.handle not in self.paid:
            self.paid[request.handle] = request
            self.free[tenant].append(self.next_turn[tenant])
            self.next_turn[tenant] += request.total_length
        turn = min(self.free[tenant])
        self.free[tenant].remove(turn)
        own = [one for one, _ in self.running.values() if one.submit.tenant == tenant]
        turns = sorted([turn, *(self.running[one.handle][1] for one in own)])
        for one, its in zip(sorted([*own, request], key=queue_key), turns, strict=True):
            self.running[one.handle] = one, its

    def preempt(self, request: Request) -> None:
        self.free[request.submit.tenant].append(self.running.pop(request.handle)[1])
        self.add(request)

    def end(self, request: Request) -> None:
        if request.handle in self.running:
            del self.running[request.handle]
        else:
            self.waiting.remove(request)
            if request.handle in self.paid:
                self.free[request.submit.tenant].remove(max(self.free[request.submit.tenant]))
        if request.handle in self.paid:
            self.next_turn[request.submit.tenant] -= request.total_length - request.known
            del self.paid[request.handle]


def new_request(number: int, tenant: str, priority: int, cost: int, queue: RequestQueue, salt: bytes) -> Request:
    start = queue.enter(tenant, salt, cost)
    return bare_request(number, tenant=tenant, priority=priority, max_new_tokens=cost - 1, virtual_start=start)


def test_the_order_is_that_of_the_definition() -> None:
    for seed in range(60):
        draw, queue, oracle = random.Random(seed), RequestQueue(), Oracle()
        tenants = TENANTS[: draw.randint(1, 3)]
        for number in range(1, 250):
            match draw.choices(("add", "take", "preempt", "end"), (5, 4, 1, 2))[0]:
                case "add":
                    salt = draw.choice((b"", b"x", b"y"))
                    priority = draw.choice((0, 0, 0, -5, 1, 1000))
                    request = new_request(number, draw.choice(tenants), priority, draw.randint(2, 50), queue, salt)
                    queue.add(request)
                    oracle.add(request)
                case "take" if oracle.waiting:
                    request = draw.choice(queue.first()[:3])[1]
                    queue.take(request, 0.0)
                    request.move(Move.ADMIT)
                    oracle.take(request)
                case "preempt" if oracle.running:
                    request = draw.choice([one for one, _ in oracle.running.values()])
                    request.move(Move.PREEMPT)
                    queue.enqueue(request)
                    oracle.preempt(request)
                case "end" if oracle.waiting or oracle.running:
                    request = draw.choice(oracle.waiting + [one for one, _ in oracle.running.values()])
                    is_waiting = request in oracle.waiting
                    request.move(Move.END)
                    if is_waiting:
                        queue.withdraw(request)
                    queue.remove(request)
                    oracle.end(request)
                case _:
                    continue
            handles = [one.handle for one in oracle.order()]
            assert [entry[1].handle for entry in queue.first()] == handles[:WINDOW], f"seed {seed}, step {number}"
            head = queue.head()
            assert ([head.handle] if head else []) == handles[:1]
            assert {one.handle: its for one, its in oracle.running.values()} == {
                one.handle: one.turn for tenant in queue.tenants.values() for _, one in tenant.running
            }
