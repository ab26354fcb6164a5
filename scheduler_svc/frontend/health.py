"""Owns the health that callers see (grpc.health.v1): stores one state and sends it to the Watch calls.

Of the causes it knows only a word. `set` stores the state, notifies the watches and never waits. Each Watch call writes
on its own and has no queue: when its write returns, it sends the state that is stored then, so a caller that reads
nothing delays no other. All services of a front end have the same health. An unknown service name is answered and not
stored.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from scheduler_svc.door.tenant import EVERYONE, Caller
from scheduler_svc.frontend.door.entrance import caller
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES
from scheduler_svc.frontend.sizes import MAX_SERVICE_NAME_CHARS

MAX_WATCHES = 1000
# Of one connection.
MAX_OWN_WATCHES = 100

State = pb.HealthCheckResponse
# Trailing metadata of a Check that answers NOT_SERVING: a word for the reason, and Unix time. Everyone may read them.
REASON_KEY, SINCE_KEY = "tandem-reason", "tandem-since"


@dataclass(slots=True, eq=False)
class _WatchCall:
    """One Watch call."""

    task: "asyncio.Task[Any] | None"
    caller: Caller = EVERYONE
    is_revoked: bool = False
    # The loop's time at which the current write began; 0 between writes.
    blocked_since: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def check_name(name: str) -> None:
    """Refuses a name that is too long for the answer that it is unknown."""
    if len(name) > MAX_SERVICE_NAME_CHARS:
        message = f"service is {len(name)} characters long; the limit is {MAX_SERVICE_NAME_CHARS}"
        raise status.invalid("service", message)


class HealthServicer(health_pb2_grpc.HealthServicer):
    """NOT_SERVING until `set` changes it. `services` are the known names; the empty name stands for all of them."""

    def __init__(self, services: Sequence[str], max_watches: int | None = None) -> None:
        self._services = frozenset(services)
        self._max_watches = MAX_WATCHES if max_watches is None else max_watches
        self._state = State.NOT_SERVING
        self._metadata: tuple[tuple[str, str], ...] = ()
        # In order of arrival.
        self._watches: dict[_WatchCall, None] = {}
        # By connection.
        self._num_own: Counter[str] = Counter()

    def set(self, *, reason: str, since: float) -> None:
        """Stores the state: SERVING if `reason`, a word, is empty. Every later answer has it."""
        self._state = State.NOT_SERVING if reason else State.SERVING
        self._metadata = ((REASON_KEY, reason), (SINCE_KEY, f"{since:.3f}")) if reason else ()
        for watch in self._watches:
            watch.changed.set()

    def admit_watch(self) -> int:
        """The size limit of a Watch request in bytes. Raises Refusal if too many watches are open."""
        if len(self._watches) >= self._max_watches:
            raise status.overloaded(f"{len(self._watches)} health watches are open; the limit is {self._max_watches}")
        return MAX_SMALL_BYTES

    def stalled(self, seconds: float) -> "set[asyncio.Task[Any]]":
        """The tasks of watches with a write that has been blocked for this long."""
        before = asyncio.get_running_loop().time() - seconds
        return {watch.task for watch in self._watches if watch.task and 0 < watch.blocked_since <= before}

    def end_revoked(self, is_revoked: Callable[[Caller], bool]) -> None:
        """Ends the watches of callers whose token or certificate was revoked."""
        for watch in self._watches:
            if not watch.is_revoked and is_revoked(watch.caller):
                watch.is_revoked = True
                watch.changed.set()
                if watch.blocked_since and watch.task is not None:
                    # The write may never end.
                    watch.task.cancel()

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """Returns the health of one service. NOT_FOUND if the name is unknown."""
        check_name(request.service)
        if request.service not in self._services:
            message = f"service {request.service[:128]!r} is not known here"
            raise status.Refusal(grpc.StatusCode.NOT_FOUND, message)
        if self._metadata:
            context.set_trailing_metadata(self._metadata)
        return pb.HealthCheckResponse(status=self._state)

    async def List(self, request: Any, context: Any) -> Any:
        """Returns the health of every service."""
        # The types of grpcio-health-checking lack this message.
        return cast(Any, pb).HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._state) for name in self._services}
        )

    # A coroutine that writes, like every streaming method of the front end.
    async def Watch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.HealthCheckRequest, context: Any
    ) -> None:
        """Sends the health of one service now and after each change; SERVICE_UNKNOWN if the name is unknown."""
        check_name(request.service)
        is_known, loop = request.service in self._services, asyncio.get_running_loop()
        request.Clear()
        # Several calls may have been admitted while they waited for their messages.
        self.admit_watch()
        peer = context.peer()
        if self._num_own[peer] >= MAX_OWN_WATCHES:
            count = f"{self._num_own[peer]} health watches of this connection are open"
            raise status.overloaded(f"{count}; the limit is {MAX_OWN_WATCHES}")
        watch, sent = _WatchCall(asyncio.current_task(), caller()), None
        self._watches[watch] = None
        self._num_own[peer] += 1
        try:
            while True:
                watch.changed.clear()
                state = self._state if is_known else State.SERVICE_UNKNOWN
                if state != sent:
                    sent, watch.blocked_since = state, loop.time()
                    await context.write(pb.HealthCheckResponse(status=state))
                    watch.blocked_since = 0.0
                await watch.changed.wait()
                if watch.is_revoked:
                    raise status.revoked()
        finally:
            del self._watches[watch]
            self._num_own -= Counter([peer])
