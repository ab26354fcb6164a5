"""Owns the forced end of calls that grpc.aio cannot end: their answer is written and the caller does not take it.

grpc.aio has no way to cancel a call from the server. A call is released, which resets its HTTP/2 stream, once the two
tasks that serve it have ended: the handler's, and one that waits for gRPC to report the call's end. gRPC's core writes
that report into objects that only these tasks hold, so the objects are kept alive until it has been written. grpc.aio
itself holds on to its first call and to the newest one, which are reset later. Knows the names of grpcio 1.85.1; with
another version that has other names nothing is released, and the log says so.
"""

import asyncio
import gc
import logging
from collections.abc import Collection
from typing import Any, cast

logger = logging.getLogger(__name__)

# The coroutine of the second task, and the types along the way from a task to what gRPC's core writes into.
WAITING_COROUTINE = "_schedule_rpc_coro"
CONTAINERS = ("coroutine", "tuple")
SCOPE_PREFIX = "__pyx_scope_struct"
OPERATION_SUFFIX = "Operation"
BATCH = "_BatchOperationTag"


class Releaser:
    """Ends calls by their handlers' tasks. Keeps what gRPC's core may still write into until the next `release`."""

    def __init__(self) -> None:
        self._kept: list[object] = []
        self._has_warned = False

    def release(self, overdue: Collection["asyncio.Task[Any]"]) -> int:
        """Ends these calls; returns how many of them it could end. To be called at most every second or so."""
        # A second is a thousand times what the core takes to report the end of a call.
        self._kept = []
        overdue = {task for task in overdue if not task.done()}
        if not overdue:
            return 0
        num_found = num_released = 0
        for task in asyncio.all_tasks():
            handler = _handler_of(task, overdue)
            if handler is None:
                continue
            num_found += 1
            waited_for = _operations(task.get_coro())
            # None: gRPC has reported the call's end, and both tasks are about to end by themselves.
            if waited_for:
                self._kept += waited_for + _operations(handler.get_coro())
                handler.cancel()
                task.cancel()
                num_released += 1
        if num_found < len(overdue) and not self._has_warned:
            self._has_warned = True
            logger.error(
                "%d of %d calls whose answer is not taken cannot be ended with this version of grpcio",
                len(overdue) - num_found,
                len(overdue),
            )
        return num_released


def _handler_of(task: "asyncio.Task[Any]", overdue: Collection["asyncio.Task[Any]"]) -> "asyncio.Task[Any] | None":
    """The handler's task that this one waits beside, if it is overdue."""
    coroutine = task.get_coro()
    if getattr(coroutine, "__name__", "") != WAITING_COROUTINE:
        return None
    for scope in gc.get_referents(coroutine):
        for held in gc.get_referents(scope):
            if isinstance(held, asyncio.Task) and held in overdue:
                return cast("asyncio.Task[Any]", held)
    return None


def _operations(coroutine: object) -> list[object]:
    """The operations that the coroutine's innermost calls have handed to gRPC's core."""
    found, seen, left = list[object](), set[int](), [coroutine]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        name = type(one).__name__
        if name.endswith(OPERATION_SUFFIX) or name == BATCH:
            found.append(one)
        elif name in CONTAINERS or name.startswith(SCOPE_PREFIX):
            left.extend(gc.get_referents(one))
    return found
