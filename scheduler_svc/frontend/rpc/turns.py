"""Owns the order in which new requests get the event loop: one per turn of the loop, so that running streams continue.

A request is parsed, checked, tokenized and hashed in about a millisecond, without a pause. If the handlers of many new
requests were ready in one turn of the loop, the tokens of every running stream would wait for all of them. Tenants
take turns, so that many requests of one of them delay each request of another by one of its own only. Those that wait
hold their messages in memory, which is bounded.
"""

import asyncio
from collections import deque

from scheduler_svc.frontend.rpc import status

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
                f"the caller's requests that wait to be read have {own:,} bytes and this one {num_bytes:,}; the limit"
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
