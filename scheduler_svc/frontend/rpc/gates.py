"""Owns the bounds that callers share, so that none of them can take all: places, turns, slots for reading, refusals.

**Places.** A tenant may have as many places as it leaves free. So one that takes the most leaves half of them, the next
one half of the rest, and so on; the last place goes to a tenant that has none. Without tokens there is one tenant, and
it may take all.

**Turns.** New requests get the event loop one per turn of the loop, so that running streams continue. A request is
parsed, checked, tokenized and hashed in about a millisecond, without a pause. If the handlers of many new requests were
ready in one turn of the loop, the tokens of every running stream would wait for all of them. Tenants take turns, so
that many requests of one of them delay each request of another by one of its own only. Those that wait hold their
messages in memory, which is bounded.

**Slots for reading.** gRPC takes up to a whole message of memory for each read that waits. While a call is not read,
gRPC holds at most its HTTP/2 window (`options.WINDOW_BYTES`). Once it is read, gRPC lets the message in, however slowly
it arrives. So the memory of calls that stall is the number of slots times the largest message. Tenants share the slots.
Calls that wait for a slot get it tenant by tenant, the newest call of a tenant first: if calls stall, old ones in the
queue are likely to stall too. While a call waits, a message that has been read for YIELD_SECONDS gives up its slot: one
of the tenant with the most slots, or of the waiting tenant if no other has more.

**Held refusals.** Beyond a rate, a caller's refusals are held for up to five seconds, whatever the reason. gRPC accepts
the calls of all tenants one after the other, each in a turn of the event loop. A tenant whose many callers send again
at once, whatever the answer says, would fill that line, and others would wait in it. While a refusal is held, its
caller does not send. Held calls are bounded, and tenants share the bound. Callers that are no tenant, because their
proof is wrong, count by their address, and share the places of one tenant.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from scheduler_svc.frontend.grpc_tuning.sockets import network_of
from scheduler_svc.frontend.rpc import status
from tandem_contract.plural import counted, numbered


def share(num_places: int, num_of_others: int, *, is_shared: bool) -> int:
    """The most places that a tenant may have beside those of others."""
    free = max(0, num_places - num_of_others)
    return (free + 1) // 2 if is_shared else free


class Places:
    """What each tenant has of them."""

    def __init__(self, num_places: int, *, is_shared: bool) -> None:
        """`is_shared`: whether several tenants call."""
        self._num_places = num_places
        self._is_shared = is_shared
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def of(self, tenant: str) -> int:
        """The places that the tenant has."""
        return self._taken[tenant]

    def limit(self, tenant: str) -> int:
        """The most places that the tenant may have now."""
        return share(self._num_places, self.num_taken - self._taken[tenant], is_shared=self._is_shared)

    def add(self, tenant: str, change: int) -> None:
        """Takes places, or gives them back if `change` is negative."""
        self.num_taken += change
        self._taken[tenant] += change
        if not self._taken[tenant]:
            del self._taken[tenant]

    def replace(self, taken: Mapping[str, int]) -> None:
        """Stores what all tenants have."""
        self._taken = Counter(taken)
        self.num_taken = self._taken.total()


MAX_WAITING_BYTES = 256 << 20


class Turns:
    """Lets one task pass per turn of the event loop: the tenants round robin, each in order of arrival."""

    def __init__(self) -> None:
        # The tenants with waiting requests, the next one first; each request with the bytes of its message.
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._num_bytes: dict[str, int] = {}
        # Whether a task has passed in this turn.
        self._is_taken = False

    async def wait(self, tenant: str, num_bytes: int) -> None:
        """Returns at once, or in a later turn if another task passes in this one.

        Raises Refusal (RESOURCE_EXHAUSTED) if too many bytes wait. A tenant may hold as much as is free, so one that
        holds the most leaves room for others.
        """
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        own, free = self._num_bytes.get(tenant, 0), MAX_WAITING_BYTES - sum(self._num_bytes.values())
        if own + num_bytes > free:
            raise status.overloaded(
                f"the caller's requests that wait to be read have {counted(own, 'byte')} "
                f"and this one {num_bytes:,}; the limit"
                f" is {free:,}, as much as is free"
            )
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, num_bytes))
        self._num_bytes[tenant] = own + num_bytes
        await turn

    def _next(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            of_tenant = self._waiting.pop(tenant)
            turn, num_bytes = of_tenant.popleft()
            self._num_bytes[tenant] -= num_bytes
            if of_tenant:
                # To the end of the round.
                self._waiting[tenant] = of_tenant
            else:
                del self._num_bytes[tenant]
            # The caller of a cancelled task is gone.
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False


# A message of 4 MB is here in that time at 16 Mbit/s.
YIELD_SECONDS = 2.0
YIELD_LOOKS = 2


@dataclass(slots=True)
class _Read:
    tenant: str
    # On the loop's clock.
    arrived_at: float
    began_at: float
    # How often it was found unfinished. After a pause of the process its bytes may be here, unread.
    num_looks: int = 0
    is_ending: bool = False


class ReadSlots:
    """The slots of some methods. A call is known by its context."""

    def __init__(self, num_slots: int, seconds: float, *, is_shared: bool) -> None:
        """`seconds`: the time of a call until its message is here. `is_shared`: whether several tenants call."""
        self._num_slots = num_slots
        self._seconds = seconds
        self._places = Places(num_slots, is_shared=is_shared)
        # The oldest first.
        self._reads: dict[Any, _Read] = {}
        # The calls that wait, by tenant, the next tenant first.
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    async def take(self, context: Any, tenant: str) -> None:
        """Waits for a slot. Raises Refusal (RESOURCE_EXHAUSTED) when the time of the call is over."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if tenant not in self._waiting and self._has_room(tenant):
            self._places.add(tenant, 1)
        else:
            await self._wait(tenant, loop.create_future())
        self._reads[context] = _Read(tenant, now, loop.time())

    def give_back(self, context: Any) -> None:
        """Ends what `take` began."""
        self._free(self._reads.pop(context).tenant)

    def ending(self) -> list[tuple[Any, status.Refusal]]:
        """The calls that must end now without their message, and why. The owner asks about once a second."""
        now = asyncio.get_running_loop().time()
        found = [
            (context, status.deadline_passed(f"the call sent no message for {self._seconds:g} s"))
            for context, read in self._reads.items()
            if not read.is_ending and now - read.arrived_at >= self._seconds
        ]
        for context, _ in found:
            self._reads[context].is_ending = True
        return found + self._yielding(now)

    def _yielding(self, now: float) -> list[tuple[Any, status.Refusal]]:
        slow: dict[Any, _Read] = {}
        for context, read in self._reads.items():
            read.num_looks += 1
            if not read.is_ending and read.num_looks >= YIELD_LOOKS and now - read.began_at >= YIELD_SECONDS:
                slow[context] = read
        found: list[tuple[Any, status.Refusal]] = []
        for waiting, turns in self._waiting.items():
            for _ in [turn for turn in turns if not turn.done()]:
                of = {read.tenant: self._places.of(read.tenant) for read in slow.values()}
                most = max(of, key=of.__getitem__, default=waiting)
                owner = most if of.get(most, 0) > self._places.of(waiting) + 1 else waiting
                context = next((each for each, read in slow.items() if read.tenant == owner), None)
                if context is None:
                    break
                slow.pop(context).is_ending = True
                message = (
                    f"the message was not here after {YIELD_SECONDS:g} s, and other calls wait to be read;"
                    f" {numbered(self._num_slots, 'message', 'are')} read at once"
                )
                found.append((context, status.overloaded(message)))
        return found

    async def _wait(self, tenant: str, turn: asyncio.Future[None]) -> None:
        self._waiting.setdefault(tenant, []).append(turn)
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if not turn.cancelled():
                # The time was over, or the caller left, in the turn in which the call got its slot.
                self._free(tenant)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise status.overloaded(
                f"the call's message could not be read for {self._seconds:g} s:"
                f" {numbered(self._num_slots, 'message', 'are')} read at once, and {self._places.of(tenant)} of the"
                " same caller are not complete"
            ) from None

    def _free(self, tenant: str) -> None:
        self._places.add(tenant, -1)
        for each in list(self._waiting):
            self._pass_on(each)

    def _has_room(self, tenant: str) -> bool:
        return self._places.of(tenant) < self._places.limit(tenant)

    def _pass_on(self, tenant: str) -> None:
        """Gives the tenant's newest waiting call a slot, if there is one for it."""
        turns = self._waiting[tenant]
        # Calls that have left.
        while turns and turns[-1].done():
            turns.pop()
        if turns and self._has_room(tenant):
            self._places.add(tenant, 1)
            turns.pop().set_result(None)
            # To the end of the round.
            self._waiting[tenant] = self._waiting.pop(tenant)
        if not turns:
            del self._waiting[tenant]


# Most retry hints are longer. A refusal without a hint would not become another answer by a retry.
MAX_HOLD_SECONDS, LEAST_SHARE = 5.0, 0.5
# Refusals of one caller that are answered at once: per second, and after a pause.
PER_SECOND = 10
BURST = 20
# Each takes about 60 KB; the next one is answered at once.
MAX_HELD = 1024
# Callers whose rate is known, tenants and addresses; more of them count together.
MAX_KNOWN = 4096
# No tenant has such a name.
_UNKNOWN, _OTHERS = "\nunknown", "\nothers"


class HeldRefusals:
    """The refusals that wait."""

    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared`: whether several tenants call; otherwise nothing is held, because nobody else waits."""
        self._is_shared = is_shared
        self._held = Places(MAX_HELD, is_shared=is_shared)
        # By caller, the loop's time at which its burst is whole again (virtual scheduling of a leaky bucket, ITU-T
        # I.371, also known as GCRA). The caller that was refused last is the last one.
        self._whole_at: dict[str, float] = {}

    async def hold(self, tenant: str | None, context: Any, refusal: status.Refusal, begun: float) -> None:
        """Returns when the call may be refused: at once, or after a random part of the time of its retry hint.

        The part is LEAST_SHARE at least. Without a hint, and at most, it is of MAX_HOLD_SECONDS. `tenant`: None if it
        is unknown. `begun`: when the call began, on the loop's clock; its age counts as held.
        """
        # If the service is not ready, it refuses everybody, and nobody waits for an answer behind these callers.
        if not self._is_shared or refusal.ends_answer or refusal.code is grpc.StatusCode.UNAVAILABLE:
            return
        who = address_of(context.peer()) if tenant is None else tenant
        place = _UNKNOWN if tenant is None else tenant
        if self._is_within_rate(who) or self._held.of(place) >= self._held.limit(place):
            return
        hint = refusal.retry_after_seconds
        most = MAX_HOLD_SECONDS if hint is None else min(MAX_HOLD_SECONDS, hint)
        self._held.add(place, 1)
        try:
            # Calls that came together do not return together.
            seconds = random.uniform(LEAST_SHARE, 1.0) * most
            await asyncio.sleep(seconds - (asyncio.get_running_loop().time() - begun))
        finally:
            self._held.add(place, -1)

    def _is_within_rate(self, who: str) -> bool:
        now = asyncio.get_running_loop().time()
        while self._whole_at and self._whole_at[oldest := next(iter(self._whole_at))] <= now:
            del self._whole_at[oldest]
        if who not in self._whole_at and len(self._whole_at) >= MAX_KNOWN:
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
