"""Owns every call between its arrival and its end: reads its message, bounds how long it may lack one, and ends it.

Knows nothing of what the methods do. All methods are served as gRPC streams of bytes, so that a call can be refused
before its message is read, parsed or checked. Three things may last, and each has a bound: a call without its message,
the method itself (bounded by its owner), and a finished call whose answer the caller does not take. Facts of grpc.aio
that shape this (tried on 1.85.1): a handler that sets a code and returns costs less than one that calls `abort`; a
read must not be cancelled, because gRPC's core writes into it, so a call that is late is aborted from another task; a
handler whose caller leaves gets CancelledError while it waits and ExecuteBatchError (an InternalError) in a write.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio

from scheduler_svc.frontend.rpc import parsing, status
from scheduler_svc.frontend.rpc.release import Releaser

logger = logging.getLogger(__name__)

# Every answer is on its way for a moment; one that is not taken for so long is counted.
UNREAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The bounds of one front end's calls."""

    # A call may lack its message for so long,
    message_seconds: float = 10.0
    # and so many at once; the next is refused. Each takes 24 KB.
    max_without_message: int = 2048
    # A finished call whose answer is not taken for so long is cancelled,
    answer_seconds: float = 60.0
    # and when there are so many of them, 25 to 80 KB each, every call is refused.
    max_unread: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the calls of one method are served."""

    # The class of the request.
    request: type[Any]
    # Called before the message is read and again before it is parsed. Returns the most bytes that it may have. Raises
    # Refusal.
    admit: Callable[[], int]
    # Takes the request and the context. Writes its answers to the context itself, or returns the only one.
    answer: Callable[[Any, Any], Awaitable[Any]]
    # Of an answer.
    serialize: Callable[[Any], bytes]
    # Calls beyond the shared bounds that this method may still have: health is asked most when the bounds are reached.
    reserve: int = 0


def is_not_of_a_lost_caller(record: logging.LogRecord) -> bool:
    """For gRPC's own logger: leaves out the tracebacks of writes to callers that are gone."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


class Calls:
    """All calls of this front end."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._releaser = Releaser()
        # Contexts, oldest first, with the loop's time of their arrival.
        self._without_message: dict[Any, float] = {}
        # Handlers' tasks whose answer is on its way, with the time they ended at, oldest first.
        self._finished: dict[asyncio.Task[Any], float] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        # Of the finished, those whose caller has not taken the answer for UNREAD_SECONDS at the last sweep.
        self.num_unread = 0

    @property
    def num_without_message(self) -> int:
        return len(self._without_message)

    def handler(self, method: Method) -> Any:
        """What gRPC calls for a method."""

        async def serve(_: object, context: Any) -> None:
            try:
                await self._serve(method, context)
            except grpc.aio.InternalError:
                # The caller is gone. A cancelled handler is what grpc.aio ends quietly.
                raise asyncio.CancelledError from None
            except (status.Refusal, grpc.aio.AbortError) as error:
                if isinstance(error, grpc.aio.AbortError):
                    raise
                status.refuse(context, error)
            except Exception as error:
                logger.error("a handler failed", exc_info=error)
                message = "an internal error of the service; its log has the details"
                status.refuse(context, status.Refusal(grpc.StatusCode.INTERNAL, message))
            finally:
                self._finish()

        return cast(Any, grpc).stream_stream_rpc_method_handler(serve, response_serializer=method.serialize)

    def sweep(self, stalled: Collection["asyncio.Task[Any]"] = ()) -> None:
        """Ends calls that lack their message, calls whose answer is not taken, and `stalled` ones, by their tasks.

        To be called every second or so.
        """
        now = asyncio.get_running_loop().time()
        for context, since in list(self._without_message.items()):
            if now - since < self._limits.message_seconds:
                break
            del self._without_message[context]
            self._abort(context)
        ages = [(task, now - since) for task, since in self._finished.items()]
        self.num_unread = sum(age >= UNREAD_SECONDS for _, age in ages)
        overdue = {task for task, age in ages if age >= self._limits.answer_seconds}
        if num_released := self._releaser.release(overdue.union(stalled)):
            logger.warning(
                "%d calls cancelled: their callers have not taken the answer for %g s",
                num_released,
                self._limits.answer_seconds,
            )

    async def _serve(self, method: Method, context: Any) -> None:
        if self.num_unread >= self._limits.max_unread + method.reserve:
            raise status.overloaded(
                f"{self.num_unread} finished calls have answers that their callers have not taken; the limit is"
                f" {self._limits.max_unread}"
            )
        method.admit()
        data = await self._read(method, context)
        parsing.check_size(method.request, data, method.admit())
        request = parsing.parse(method.request, data)
        del data
        answer = await method.answer(request, context)
        if answer is not None:
            self._finish()
            await context.write(answer)

    async def _read(self, method: Method, context: Any) -> bytes:
        if len(self._without_message) >= self._limits.max_without_message + method.reserve:
            raise status.overloaded(
                f"{len(self._without_message)} calls wait for their message; the limit is"
                f" {self._limits.max_without_message}"
            )
        self._without_message[context] = asyncio.get_running_loop().time()
        try:
            data = await context.read()
        finally:
            self._without_message.pop(context, None)
        if data is grpc.aio.EOF:
            raise status.invalid("request", "the call ended without its message; one is needed")
        return data

    def _abort(self, context: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._abort_late(context))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_late(self, context: Any) -> None:
        message = f"the call has been without its message for {self._limits.message_seconds:g} s"
        refusal = status.deadline_passed(message)
        try:
            # The handler's read ends with this, and raises the same AbortError there.
            await context.abort(refusal.code, refusal.message, refusal.metadata())
        except (grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError):
            return

    def _finish(self) -> None:
        """What is left of the running task's call is its last answer's way to the caller."""
        task = asyncio.current_task()
        assert task is not None
        if task not in self._finished:
            self._finished[task] = asyncio.get_running_loop().time()
            task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._finished.pop(task, None)
