"""Owns the calls that stay open and write what changes: watches of health, and of what operators have started.

A watch has no queue: it writes what is newest when its last write has returned, so a caller that reads slowly delays
no other call. Ends those with a revoked caller, and finds those with a caller that does not read.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.door.tenant import Caller
from scheduler_svc.frontend.rpc import status


@dataclass(slots=True, eq=False, kw_only=True)
class Watch:
    # None: the call is short, so that no check ends it.
    caller: Caller | None = None
    task: "asyncio.Task[Any] | None" = field(default_factory=asyncio.current_task)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_revoked: bool = False
    # The loop's time at which the current write began; 0 between writes.
    blocked_since: float = 0.0

    async def write(self, context: Any, message: Any) -> None:
        self.blocked_since = asyncio.get_running_loop().time()
        await context.write(message)
        self.blocked_since = 0.0

    async def wait(self) -> None:
        """Waits for a change. Raises Refusal if the caller was revoked."""
        await self.changed.wait()
        if self.is_revoked:
            raise status.revoked()
        self.changed.clear()


def stalled(watches: Iterable[Watch], seconds: float) -> "set[asyncio.Task[Any]]":
    """Returns the tasks of watches with a write that has been blocked for this long."""
    before = asyncio.get_running_loop().time() - seconds
    return {watch.task for watch in watches if watch.task and 0 < watch.blocked_since <= before}


def end_revoked(watches: Iterable[Watch], is_revoked: Callable[[Caller], bool]) -> None:
    """Ends the watches of callers with a revoked token or certificate."""
    for watch in watches:
        if watch.caller is not None and not watch.is_revoked and is_revoked(watch.caller):
            watch.is_revoked = True
            watch.changed.set()
            if watch.blocked_since and watch.task is not None:
                # The write may never end.
                watch.task.cancel()
