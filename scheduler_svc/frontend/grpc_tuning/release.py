"""Owns the forced end of calls that grpc.aio cannot end: the answer is written and the caller does not read it.

grpc.aio has no way to cancel a call from the server. A call is released, which resets its HTTP/2 stream, when the two
tasks that serve it have ended: the handler's task, and a task that waits for gRPC to report the call's end. gRPC's core
writes that report into objects that only these tasks hold, so the releaser keeps the objects alive until the report has
been written. grpc.aio itself keeps references to its newest call, and to the first one of Watch and of all methods of
other services, so those three are reset later. The names below are those of grpcio 1.85.1. With a version that has
other names nothing is released, and the log reports it.
"""

import asyncio
import gc
import logging
from collections.abc import Collection
from typing import Any, cast

logger = logging.getLogger(__name__)

# The coroutine of the second task, and the types on the path from a task to the objects that gRPC's core writes into.
WAITING_COROUTINE = "_schedule_rpc_coro"
CONTAINERS = ("coroutine", "tuple")
SCOPE_PREFIX = "__pyx_scope_struct"
OPERATION_SUFFIX = "Operation"
BATCH = "_BatchOperationTag"


class Releaser:
    """Ends calls by their handlers' tasks. Keeps the objects that gRPC's core may still write into for one sweep."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._kept: list[object] = []
        self._has_warned = False

    def release(self, overdue: Collection["asyncio.Task[Any]"]) -> int:
        """Ends the calls of these tasks and returns how many it could end. Call it at most about once a second."""
        # One second is a thousand times what gRPC's core takes to report the end of a call.
        self._kept = []
        overdue = {task for task in overdue if not task.done()}
        if not overdue or not self._is_on:
            return 0
        num_found = num_released = 0
        for task in asyncio.all_tasks():
            handler = _handler_of(task, overdue)
            if handler is None:
                continue
            num_found += 1
            operations = _operations(task.get_coro())
            # Without an operation, gRPC has reported the call's end and both tasks are about to end on their own.
            if operations:
                self._kept += operations + _operations(handler.get_coro())
                handler.cancel()
                task.cancel()
                num_released += 1
        if num_found < len(overdue) and not self._has_warned:
            self._has_warned = True
            logger.error(
                "%d of %d calls with an unread answer cannot be ended with this version of grpcio",
                len(overdue) - num_found,
                len(overdue),
            )
        return num_released


def _handler_of(task: "asyncio.Task[Any]", overdue: Collection["asyncio.Task[Any]"]) -> "asyncio.Task[Any] | None":
    """The overdue handler's task that belongs to this waiting task; None for any other task."""
    coroutine = task.get_coro()
    if getattr(coroutine, "__name__", "") != WAITING_COROUTINE:
        return None
    for scope in gc.get_referents(coroutine):
        for held in gc.get_referents(scope):
            if isinstance(held, asyncio.Task) and held in overdue:
                return cast("asyncio.Task[Any]", held)
    return None


def _operations(coroutine: object) -> list[object]:
    """The operations that the coroutine's innermost calls have passed to gRPC's core."""
    found, seen, pending = list[object](), set[int](), [coroutine]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        name = type(one).__name__
        if name.endswith(OPERATION_SUFFIX) or name == BATCH:
            found.append(one)
        elif name in CONTAINERS or name.startswith(SCOPE_PREFIX):
            pending.extend(gc.get_referents(one))
    return found
