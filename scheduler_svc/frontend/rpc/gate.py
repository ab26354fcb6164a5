"""One gate for everything that callers share: how much of it one may have, which calls wait, and which comes next.

Everything shared is counted in places, by a key: the tenant of a call, or its connection where tenants must not matter.
A `Bound` says how many places there are and how many one key may have; `Places` counts them. A call that finds none is
refused at once, or waits at a `Gate`. A refusal may be held (`HeldRefusals`).

**Shares.** A key may have as many places as it leaves free. So one that takes the most leaves half of them, the next
one half of the rest, and so on; the last place goes to a key that has none. Without tokens there is one tenant, which
may take all.

**Order.** The key that has used the least goes next; of equal ones, the one that got in, or began to wait, the longest
ago. If `leave` gets the cost of the time inside, this is start-time fair queueing (Goyal, Vin and Cheng, 1996),
which needs no costs in advance: a key with expensive work delays another by what runs, and gets no credit for
idle time. If it gets none, keys take turns.

**Held refusals.** gRPC accepts the calls of all tenants one after the other, each in a turn of the event loop. A tenant
with many callers that send again at once, against the answer's advice, would fill that line. While a refusal is held,
its caller does not send. Callers without a tenant, because their proof is wrong, share the places of one tenant.

| what | a place is | key | when all are taken |
|---|---|---|---|
| calls without their message, unread answers | a call | tenant, connection | refused |
| messages that are read (`calls.Reading`) | a call | tenant, connection | waits for seconds, the newest call first |
| requests that are parsed (`methods`) | some turns of the event loop | tenant | waits; bounded by bytes |
| long texts (`text/tokenizer`) | a thread, by its CPU time | tenant | waits |
| trials of grammars (`constraints/trials`) | the process, by its time | tenant | waits |
| ListRequests (`control`) | a query to the core | tenant | waits |
| samples (`streaming/stream_table`), health watches | one of them | tenant, connection | refused |
| new requests (`readiness`) | not counted; closed for all, or for one tenant | tenant | refused |
| refusals (`HeldRefusals`) | a held call | tenant, address | answered at once |

Calls of health are counted by connection and apart from all others, so no caller can shut a monitor out.
"""

import asyncio
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Generator, ItemsView, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from scheduler_svc.frontend.grpc_tuning.sockets import network_of
from scheduler_svc.frontend.rpc import status
from tandem_contract.plural import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How many places there are, and how many of them one key may have."""

    most: int = sys.maxsize
    per_key: int = sys.maxsize
    # Whether a key must leave as many free as it has.
    is_shared: bool = True
    # The sentence of a refusal, such as "call" and "have not sent their request yet".
    thing: str = ""
    state: str = ""
    retry_seconds: float = status.QUEUE_FULL_RETRY_SECONDS


class Places:
    """What each key has of a bound. They count together with those `beside`, if there are any."""

    def __init__(self, bound: Bound, beside: "Places | None" = None) -> None:
        self._bound, self._beside = bound, beside
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    @property
    def are_all_taken(self) -> bool:
        return self.num_taken >= self._bound.most

    def of(self, key: str) -> int:
        return self._taken[key] + (self._beside.of(key) if self._beside else 0)

    def limit(self, key: str) -> int:
        """The most places that the key may have now."""
        num_taken = self.num_taken + (self._beside.num_taken if self._beside else 0)
        free = max(0, self._bound.most - num_taken + self.of(key))
        return min(self._bound.per_key, (free + 1) // 2 if self._bound.is_shared else free)

    def has_room(self, key: str, num: int = 1) -> bool:
        """Whether the key may have `num` more."""
        return self.of(key) + num <= self.limit(key)

    def check(self, key: str, num: int = 1) -> None:
        """Raises Refusal (RESOURCE_EXHAUSTED) unless the key may have `num` more."""
        if not self.has_room(key, num):
            more = f" and this one adds {num:,}" if num > 1 else ""
            beside = f" and {self._beside.sentence(key)}" if self._beside and self._beside.of(key) else ""
            message = f"{self.sentence(key)}{beside}{more}; the limit is {self.limit(key):,}"
            raise status.overloaded(message, self._bound.retry_seconds)

    def sentence(self, key: str) -> str:
        """Says what the key has."""
        verb, *rest = self._bound.state.split(" ", 1)
        return " ".join((counted(self._taken[key], self._bound.thing, verb), *rest))

    def take(self, key: str, num: int = 1) -> None:
        """Gives the key places. Raises Refusal if it may not have them."""
        self.check(key, num)
        self.add(key, num)

    @contextmanager
    def taking(self, key: str) -> Generator[None]:
        """Gives the key a place for the time of the body. Raises Refusal if it may not have one."""
        self.take(key)
        try:
            yield
        finally:
            self.add(key, -1)

    def add(self, key: str, change: int) -> None:
        """Counts places, or gives them back if `change` is negative; does not check the bound."""
        self.num_taken += change
        self._taken[key] += change
        if not self._taken[key]:
            del self._taken[key]

    def replace(self, taken: Mapping[str, int]) -> None:
        self._taken = Counter(taken)
        self.num_taken = self._taken.total()

    def items(self) -> ItemsView[str, int]:
        return self._taken.items()


# The keys that a gate is closed for; more are not remembered. The callers with a known rate of refusals, tenants and
# addresses; more count together.
MAX_KEYS = 4096


class Gate:
    """Places that calls wait for. Closed, for all keys or for one, it refuses."""

    def __init__(
        self,
        inside: Bound | None = None,
        waiting: Bound | None = None,
        *,
        newest_first: bool = False,
        num_turns: int = 0,
    ) -> None:
        """Without a bound nothing is bounded. Of one key the oldest call goes first, or with `newest_first` the newest.

        `num_turns`: a place is free again after so many turns of the event loop, or in the next one if no call waits,
        and `leave` is never called.
        """
        inside = inside or Bound()
        self.inside, self.waiting = Places(inside), Places(waiting or Bound())
        self._newest_first, self._num_turns = newest_first, num_turns
        # The calls that wait, in order of arrival, with what they count for; the next key comes first.
        self._queues: dict[str, OrderedDict[asyncio.Future[None], int]] = {}
        # What each key has used, counted from the time that all had used the same; and where the last one to get in
        # stood: a key that comes back starts there.
        self.used: dict[str, float] = {}
        self._least = 0.0
        # The refusal of a key, or of all for None, and until when, on the loop's clock, unless it is until `open`.
        self._closed: dict[str | None, tuple[status.Refusal, float | None]] = {}

    def ask(self, key: str, num: int = 1) -> "asyncio.Future[None] | None":
        """Asks for a place. Returns None if the caller has it, else what is done when it has; `leave` gives it back.

        `num`: what the caller counts for while it waits. Raises Refusal if too much waits or the gate is closed.
        """
        self.check(key)
        if key not in self._queues:
            if self.used.get(key, 0.0) < self._least:
                self.used[key] = self._least
            if self.inside.has_room(key):
                self._let_in(key)
                return None
        self.waiting.take(key, num)
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, OrderedDict())[turn] = num
        return turn

    async def enter(self, key: str, num: int = 1, seconds: float | None = None) -> None:
        """Returns when the caller has a place. Raises Refusal, and TimeoutError if it has waited for `seconds`."""
        if (turn := self.ask(key, num)) is None:
            return
        async with asyncio.timeout(seconds):
            try:
                await turn
                self.check(key)
            except (asyncio.CancelledError, status.Refusal):
                self._give_up(key, turn)
                raise

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def leave(self, key: str, used: float = 0.0) -> None:
        """Gives a place back. `used`: what the time inside has cost."""
        self.inside.add(key, -1)
        if used:
            self.used[key] = self.used.get(key, 0.0) + used
        while (key_of_next := self._next()) is not None:
            self._let_one_in(key_of_next)

    def close(self, refusal: status.Refusal, key: str | None = None, seconds: float | None = None) -> None:
        """Refuses the calls that wait and that come, of one key or of all, for some seconds or until `open`."""
        if len(self._closed) >= MAX_KEYS:
            now = asyncio.get_running_loop().time()
            self._closed = {one: why for one, why in self._closed.items() if why[1] is None or now < why[1]}
        if key is None or key in self._closed or len(self._closed) < MAX_KEYS:
            until = None if seconds is None else asyncio.get_running_loop().time() + seconds
            self._closed[key] = refusal, until
        for one in list(self._queues) if key is None else self._queues.keys() & {key}:
            for turn, num in self._queues.pop(one).items():
                self.waiting.add(one, -num)
                if not turn.done():
                    turn.set_exception(refusal)

    def open(self, key: str | None = None) -> None:
        """Ends `close`."""
        self._closed.pop(key, None)

    def check(self, key: str) -> None:
        """Raises Refusal if the gate is closed for the key."""
        for one in (None, key) if self._closed else ():
            refusal, until = self._closed.get(one, (None, None))
            if until is not None and asyncio.get_running_loop().time() >= until:
                del self._closed[one]
            elif refusal is not None:
                # The same exception is raised many times, so the traceback of the last time is removed.
                raise refusal.with_traceback(None)

    def _next(self) -> str | None:
        """The key whose call goes next; None if no waiting call has a place."""
        if self.inside.are_all_taken:
            return None
        ready = (key for key in self._queues if self.inside.has_room(key))
        if not self.used:
            return next(ready, None)
        return min(ready, key=lambda key: self.used.get(key, 0.0), default=None)

    def _let_one_in(self, key: str) -> None:
        queue = self._queues.pop(key)
        while queue:
            turn, num = queue.popitem(last=self._newest_first)
            self.waiting.add(key, -num)
            # The caller of a cancelled task is gone.
            if not turn.done():
                self._let_in(key)
                turn.set_result(None)
                break
        if queue:
            # To the end of the round.
            self._queues[key] = queue

    def _let_in(self, key: str) -> None:
        self.inside.add(key, 1)
        self._least = max(self._least, self.used.get(key, 0.0))
        if self._num_turns:
            asyncio.get_running_loop().call_soon(self._pass, key, self._num_turns)

    def _pass(self, key: str, turns: int) -> None:
        if turns > 1 and self._queues:
            asyncio.get_running_loop().call_soon(self._pass, key, turns - 1)
        else:
            self.leave(key)

    def _give_up(self, key: str, turn: "asyncio.Future[None]") -> None:
        """The caller left, its time was over, or the gate was closed."""
        queue = self._queues.get(key)
        if queue is not None and turn in queue:
            self.waiting.add(key, -queue.pop(turn))
            if not queue:
                del self._queues[key]
        elif not turn.cancelled() and turn.exception() is None and not self._num_turns:
            # It got its place in this turn of the event loop.
            self.leave(key)


# Most retry hints are longer. A refusal without a hint would not become another answer by a retry.
MAX_HOLD_SECONDS, LEAST_SHARE = 5.0, 0.5
# Refusals of one caller that are answered at once: per second, and after a pause.
PER_SECOND = 10
BURST = 20
# Each takes about 60 KB; the next one is answered at once.
MAX_HELD = 1024
# No tenant has such a name.
_UNKNOWN, _OTHERS = "\nunknown", "\nothers"


class HeldRefusals:
    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared`: whether several tenants call; otherwise nothing is held, because no other tenant waits."""
        self._is_shared = is_shared
        self._held = Places(Bound(most=MAX_HELD, is_shared=is_shared))
        # By caller, the loop's time at which its burst is whole again (virtual scheduling of a leaky bucket, ITU-T
        # I.371, also known as GCRA). The caller that was refused last is the last one.
        self._whole_at: dict[str, float] = {}

    async def hold(self, tenant: str | None, context: Any, refusal: status.Refusal, begun: float) -> None:
        """Returns when the call may be refused: at once, or after a random part of the time of its retry hint.

        The part is LEAST_SHARE at least. Without a hint, and at most, it is of MAX_HOLD_SECONDS. `tenant`: None if it
        is unknown. `begun`: when the call began, on the loop's clock; its age counts as held.
        """
        # If the service is not ready, it refuses every call, and no other call waits for an answer behind these.
        if not self._is_shared or refusal.ends_answer or refusal.code is grpc.StatusCode.UNAVAILABLE:
            return
        who = address_of(context.peer()) if tenant is None else tenant
        place = _UNKNOWN if tenant is None else tenant
        if self._is_within_rate(who) or not self._held.has_room(place):
            return
        hint = refusal.retry_after_seconds
        most = MAX_HOLD_SECONDS if hint is None else min(MAX_HOLD_SECONDS, hint)
        with self._held.taking(place):
            # Calls that came together do not return together.
            seconds = random.uniform(LEAST_SHARE, 1.0) * most
            await asyncio.sleep(seconds - (asyncio.get_running_loop().time() - begun))

    def _is_within_rate(self, who: str) -> bool:
        now = asyncio.get_running_loop().time()
        while self._whole_at and self._whole_at[oldest := next(iter(self._whole_at))] <= now:
            del self._whole_at[oldest]
        if who not in self._whole_at and len(self._whole_at) >= MAX_KEYS:
            who = _OTHERS
        whole_at = max(now, self._whole_at.get(who, now)) + 1 / PER_SECOND
        # Sums of tenths are not exact.
        if whole_at - now > BURST / PER_SECOND + 1e-6:
            return False
        self._whole_at.pop(who, None)
        self._whole_at[who] = whole_at
        return True


def address_of(peer: str) -> str:
    """The name under which callers of this peer count. No tenant has a line break in its name."""
    return f"\n{network_of(peer) or ''}"
