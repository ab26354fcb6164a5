"""Owns the calls of operators that watch something which goes on in the core: drains, updates of weights.

Keeps only the newest report of each call, so a caller that reads slowly delays nobody. What is watched goes on if its
caller leaves.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc import status

REPLY_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Watch:
    """One call. `reply` is the newest one that was not written; `is_lost`: no other will come."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reply: Any = None
    is_lost: bool = False


class Watches:
    """The calls of one method. Replies have `query`, `progress` with a `state`, `refusal` and `message`."""

    def __init__(
        self,
        send: Callable[[frontend_pb2.FrontendToCore], bool],
        *,
        message_of: Callable[[int, Any], frontend_pb2.FrontendToCore],
        refusal_of: Callable[[Any], status.Refusal],
        final: frozenset[Any],
    ) -> None:
        """`send` sends a message to the core and returns False without one. `final` has the states that end a call.

        `message_of` makes the message of a query, with None in place of the request when the caller has left.
        """
        self._send = send
        self._message_of, self._refusal_of, self._final = message_of, refusal_of, final
        self._ids = itertools.count(1)
        self._watches: dict[int, _Watch] = {}

    async def serve(self, request: Any, context: Any) -> None:
        """Handles one call, whose request was checked. Raises Refusal."""
        query = next(self._ids)
        watch = self._watches[query] = _Watch()
        is_over = False
        try:
            if not self._send(self._message_of(query, request)):
                raise _unreachable()
            while not is_over:
                reply = await self._next(watch)
                is_over = bool(reply.message) or reply.progress.state in self._final
                if reply.message:
                    raise self._refusal_of(reply)
                await context.write(reply.progress)
        finally:
            del self._watches[query]
            if not is_over:
                self._send(self._message_of(query, None))

    def answer(self, reply: Any) -> None:
        """Passes a reply to its call. Drops it if the call has ended."""
        watch = self._watches.get(reply.query)
        if watch is not None:
            watch.reply = reply
            watch.changed.set()

    def fail_all(self) -> None:
        """Fails every call, because the core is gone. What it reported last is written before."""
        for watch in self._watches.values():
            watch.is_lost = True
            watch.changed.set()

    async def _next(self, watch: _Watch) -> Any:
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                await watch.changed.wait()
        except TimeoutError:
            raise status.not_ready(f"the scheduler's core has not reported for {REPLY_SECONDS:g} s") from None
        watch.changed.clear()
        reply, watch.reply = watch.reply, None
        if reply is None:
            raise _unreachable()
        if watch.is_lost:
            watch.changed.set()
        return reply


def _unreachable() -> status.Refusal:
    return status.not_ready("the scheduler's core cannot be reached")
