"""Owns the health that callers see (grpc.health.v1): stored in one place, told to those who watch.

Knows nothing of why. `set` stores and notifies and never waits. Each watcher writes by itself and has no queue: when
its write returns it looks at what is stored then, so a watcher that reads nothing delays nobody. All services of a
front end have the same health. A service with an unknown name is answered and not remembered.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES

MAX_WATCHES = 1000

State = pb.HealthCheckResponse


class _WatchCall:
    """One Watch call."""

    __slots__ = ("blocked_since", "changed", "task")

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self.task = task
        # The loop's time when a write began that has not ended; 0 between writes.
        self.blocked_since = 0.0
        # Set while it waits.
        self.changed: asyncio.Future[None] | None = None


class HealthServicer(health_pb2_grpc.HealthServicer):
    """NOT_SERVING until `set` says otherwise. `services` are the known names; the empty one means all of them."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(services)
        self._state = State.NOT_SERVING
        # Their order is that of their coming.
        self._watches: dict[_WatchCall, None] = {}

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def set(self, *, is_serving: bool) -> None:
        """Stores the state; from now on every answer has it."""
        self._state = State.SERVING if is_serving else State.NOT_SERVING
        for watch in self._watches:
            if watch.changed is not None and not watch.changed.done():
                watch.changed.set_result(None)

    def admit(self) -> int:
        """The most bytes of a request."""
        return MAX_SMALL_BYTES

    def admit_watch(self) -> int:
        """The same, for Watch. Raises Refusal where there are too many."""
        if len(self._watches) >= MAX_WATCHES:
            raise status.overloaded(f"{len(self._watches)} health watches are open; the limit is {MAX_WATCHES}")
        return MAX_SMALL_BYTES

    def stalled(self, seconds: float) -> "set[asyncio.Task[Any]]":
        """The tasks of watches whose caller has not taken a state for so long."""
        before = asyncio.get_running_loop().time() - seconds
        return {watch.task for watch in self._watches if watch.task and 0 < watch.blocked_since <= before}

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """The health of one service. NOT_FOUND where the name is unknown."""
        if request.service not in self._services:
            message = f"service {request.service[:128]!r} is not known here"
            raise status.Refusal(grpc.StatusCode.NOT_FOUND, message)
        return pb.HealthCheckResponse(status=self._state)

    async def List(self, request: Any, context: Any) -> Any:
        """The health of every service."""
        # The types of grpcio-health-checking lack it.
        return cast(Any, pb).HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._state) for name in self._services}
        )

    # A coroutine that writes, as all streaming methods here.
    async def Watch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.HealthCheckRequest, context: Any
    ) -> None:
        """The health of one service, and again whenever it changes; SERVICE_UNKNOWN where the name is unknown."""
        is_known, loop = request.service in self._services, asyncio.get_running_loop()
        request.Clear()
        # Several may have been admitted while they waited for their messages.
        self.admit_watch()
        watch, told = _WatchCall(asyncio.current_task()), None
        self._watches[watch] = None
        try:
            while True:
                state = self._state if is_known else State.SERVICE_UNKNOWN
                if state == told:
                    watch.changed = loop.create_future()
                    await watch.changed
                    continue
                told, watch.blocked_since = state, loop.time()
                await context.write(pb.HealthCheckResponse(status=state))
                watch.blocked_since = 0.0
        finally:
            del self._watches[watch]
