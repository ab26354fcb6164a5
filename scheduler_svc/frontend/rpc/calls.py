"""Owns every call from its arrival to its end: reads its message, limits how long it may lack one, and ends it.

Knows nothing of what the methods do. Every method is served as a gRPC stream of bytes, so that a call can be refused
before its message is read, parsed or checked. Three phases of a call may last, and each has a bound: waiting for the
message, the method itself (its owner bounds it), and waiting for the caller to read the answer of a finished call.

Three facts about grpc.aio (tried on 1.85.1) shape this module. A handler that sets a code and returns costs less than
one that calls `abort`. A read must not be cancelled, because gRPC's core writes into it, so another task aborts a late
call. If the caller leaves, a handler gets CancelledError while it waits and ExecuteBatchError (an InternalError) while
it writes.
"""

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
import grpc.aio

from scheduler_svc.frontend.rpc import parsing, status
from scheduler_svc.frontend.rpc.release import Releaser

logger = logging.getLogger(__name__)

# Every answer is unread for a moment. Only answers that stay unread for this long are counted.
UNREAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The bounds of one front end's calls."""

    # The service aborts a call if its message has not arrived after this time.
    message_seconds: float = 10.0
    # Calls that may wait for their message at once; the next one is refused. Each takes 24 KB.
    max_without_message: int = 2048
    # The service cancels a finished call if the caller has not read the answer after this time.
    answer_seconds: float = 60.0
    # While this many answers are unread, 25 to 80 KB each, every call is refused.
    max_unread: int = 2048


class CallLog(Protocol):
    """Learns of each call of a method: its begin, and what it ended with."""

    def begin(self, method: str, context: Any) -> Any:
        """Returns the call's record, which `end` gets back."""
        ...

    def end(self, record: Any, ending: status.Refusal | grpc.StatusCode | None) -> None:
        """`ending` is the call's refusal or gRPC code, None if it was served to its end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the calls of one method are served."""

    # The class of the request.
    request: type[Any]
    # Called with the context before anything else of the call. Raises Refusal unless the caller may call the method.
    enter: Callable[[Any], None]
    # Called before the message is read and again before it is parsed. Returns the request's size limit in bytes. Raises
    # Refusal if the call is not admitted.
    admit: Callable[[], int]
    # Called with the message's bytes before it is parsed. Raises Refusal if one of its parts is beyond its limit.
    scan: Callable[[bytes], None]
    # Called with the number of these bytes. Returns when the message may be parsed. Raises Refusal if too many wait.
    turn: Callable[[int], Awaitable[None]]
    # Takes the request and the context. Either writes its answers to the context or returns the only answer.
    answer: Callable[[Any, Any], Awaitable[Any]]
    # Serializes an answer.
    serialize: Callable[[Any], bytes]
    # Calls of this method that are admitted beyond the shared bounds. Health needs them, because monitors call it most
    # when the bounds are reached.
    reserve: int = 0
    # Called with the status of a call that is refused before `answer` is called.
    refused: Callable[[grpc.StatusCode], None] | None = None
    # The method's name, and who logs its calls.
    name: str = ""
    log: CallLog | None = None


def is_not_of_a_lost_caller(record: logging.LogRecord) -> bool:
    """A filter for gRPC's own logger: drops the tracebacks of writes to callers that are gone."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


def _running() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


class Calls:
    """All calls of this front end."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._releaser = Releaser()
        # The context and arrival time (on the loop's clock) of each call without its message, oldest first.
        self._without_message: dict[Any, float] = {}
        # The handler's task and end time of each call that is sending its answer, oldest first.
        self._finished: dict[asyncio.Task[Any], float] = {}
        # Those of calls whose caller may not make them.
        self._strangers: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._aborting: set[asyncio.Task[None]] = set()
        # Finished calls, without those of strangers, with an answer that had been unread for UNREAD_SECONDS at the last
        # sweep.
        self.num_unread = 0

    @property
    def num_without_message(self) -> int:
        return len(self._without_message)

    def handler(self, method: Method) -> Any:
        """The gRPC handler that serves `method`."""

        async def serve(_: object, context: Any) -> None:
            record = None if method.log is None else method.log.begin(method.name, context)
            ending: status.Refusal | grpc.StatusCode | None = grpc.StatusCode.CANCELLED
            try:
                await self._serve(method, context)
                ending = None
            except grpc.aio.InternalError:
                # The caller is gone. grpc.aio logs nothing when a handler is cancelled.
                raise asyncio.CancelledError from None
            except grpc.aio.AbortError:
                ending = grpc.StatusCode.DEADLINE_EXCEEDED
                raise
            except status.Refusal as refusal:
                ending = refusal
                status.refuse(context, refusal)
            except Exception:
                logger.exception("a handler failed")
                ending = status.internal("the service has an internal error; its log has the details")
                status.refuse(context, ending)
            finally:
                self._finish()
                if method.log is not None:
                    method.log.end(record, ending)

        return cast(Any, grpc).stream_stream_rpc_method_handler(serve, response_serializer=method.serialize)

    def sweep(self, stalled: Collection["asyncio.Task[Any]"] = ()) -> None:
        """Ends calls with an overdue message, calls with an unread answer, and the calls of the `stalled` tasks.

        The owner calls this about once a second.
        """
        now = asyncio.get_running_loop().time()
        for context, since in list(self._without_message.items()):
            if now - since < self._limits.message_seconds:
                break
            del self._without_message[context]
            aborting = asyncio.create_task(self._abort(context))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
        ages = [(task, now - since) for task, since in self._finished.items()]
        unread = [task for task, age in ages if age >= UNREAD_SECONDS]
        self.num_unread = sum(task not in self._strangers for task in unread)
        overdue = {task for task, age in ages if age >= self._limits.answer_seconds}
        # Whoever has no right to call must not use up the bound of the others.
        overdue.update(task for task in unread if task in self._strangers)
        if num_released := self._releaser.release(overdue.union(stalled)):
            logger.warning(
                "%d calls were cancelled: their clients have not read the answer for %g s",
                num_released,
                self._limits.answer_seconds,
            )

    async def _serve(self, method: Method, context: Any) -> None:
        try:
            request = await self._request(method, context)
        except status.Refusal as refusal:
            if method.refused is not None:
                method.refused(refusal.code)
            raise
        answer = await method.answer(request, context)
        if answer is not None:
            self._finish()
            await context.write(answer)

    async def _request(self, method: Method, context: Any) -> Any:
        """Returns the call's message. Raises Refusal if the call is not admitted."""
        try:
            method.enter(context)
        except status.Refusal:
            self._strangers.add(_running())
            raise
        if self.num_unread >= self._limits.max_unread + method.reserve:
            raise status.overloaded(
                f"{self.num_unread} finished calls have answers that their clients have not read; the limit is"
                f" {self._limits.max_unread}"
            )
        method.admit()
        data = await self._read(method, context)
        parsing.check_size(method.request, data, method.admit())
        method.scan(data)
        await method.turn(len(data))
        return parsing.parse(method.request, data)

    async def _read(self, method: Method, context: Any) -> bytes:
        if self.num_without_message >= self._limits.max_without_message + method.reserve:
            raise status.overloaded(
                f"{self.num_without_message} calls have not sent their request yet; the limit is"
                f" {self._limits.max_without_message}"
            )
        self._without_message[context] = asyncio.get_running_loop().time()
        try:
            data = await context.read()
        finally:
            self._without_message.pop(context, None)
        if data is grpc.aio.EOF:
            raise status.invalid("request", "the call ended before it sent its request")
        return data

    async def _abort(self, context: Any) -> None:
        refusal = status.deadline_passed(f"the call sent no message for {self._limits.message_seconds:g} s")
        # The handler's read raises the same AbortError.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError):
            await context.abort(refusal.code, refusal.message, refusal.metadata)

    def _finish(self) -> None:
        """Marks the running task's call as finished: it now only waits for the caller to read the last answer."""
        task = _running()
        if task not in self._finished:
            self._finished[task] = asyncio.get_running_loop().time()
            task.add_done_callback(self._finished.pop)
