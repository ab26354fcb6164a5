"""Owns how many messages are read at once: gRPC takes up to a whole message of memory for each read that waits.

While a call is not read, gRPC holds at most its HTTP/2 window (`options.WINDOW_BYTES`). Once it is read, gRPC lets the
message in, however slowly it arrives. So the memory of calls that stall is the number of slots times the largest
message. Tenants share the slots (`places`).

Calls that wait for a slot get it tenant by tenant, the newest call of a tenant first: if calls stall, old ones in the
queue are likely to stall too. While a call waits, a message that has been read for YIELD_SECONDS gives up its slot: one
of the tenant with the most slots, or of the waiting tenant if no other has more.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.places import Places

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
                    f" {self._num_slots} messages are read at once"
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
                f"the call's message could not be read for {self._seconds:g} s: {self._num_slots} messages are read at"
                f" once, and {self._places.of(tenant)} of the same caller are not complete"
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
