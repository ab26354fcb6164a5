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
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio

from scheduler_svc.frontend.grpc_tuning.release import Releaser
from scheduler_svc.frontend.grpc_tuning.resets import Resets
from scheduler_svc.frontend.grpc_tuning.tuning import ON, Tuning
from scheduler_svc.frontend.rpc import parsing, status
from scheduler_svc.frontend.rpc.held_refusals import HeldRefusals
from scheduler_svc.frontend.rpc.method import RESERVED_SECONDS, CallLimits, Method, Room
from scheduler_svc.frontend.rpc.places import Places
from scheduler_svc.frontend.rpc.read_slots import ReadSlots

logger = logging.getLogger(__name__)

# Every answer is unread for a moment. Only answers that stay unread for this long are counted.
UNREAD_SECONDS = 1.0


def is_not_of_a_lost_caller(record: logging.LogRecord) -> bool:
    """A filter for the log: drops gRPC's tracebacks of writes to callers that are gone."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.partition(".")[0] == "grpc" and isinstance(error, grpc.aio.InternalError))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the calls of a room wait for their message: with tenants as owners, or with connections."""

    without_message: Places
    slots: ReadSlots

    @classmethod
    def of(cls, room: Room, limits: CallLimits, *, is_shared: bool) -> "_Places":
        if room is Room.BULK:
            waiting = Places(limits.max_without_message, is_shared=is_shared)
            return cls(waiting, ReadSlots(limits.max_reading, limits.message_seconds, is_shared=is_shared))
        seconds = min(RESERVED_SECONDS, limits.message_seconds)
        waiting = Places(limits.max_without_message_reserved, is_shared=True)
        return cls(waiting, ReadSlots(limits.max_reading_reserved, seconds, is_shared=True))


def _check_room(places: Places, who: str, what: str) -> None:
    """Raises Refusal if the tenant or connection has all its places."""
    if places.of(who) >= places.limit(who):
        raise status.overloaded(f"{places.of(who)} {what}; the limit is {places.limit(who)}")


def _refusal_of(error: Exception) -> status.Refusal:
    """What a handler raised, for its caller."""
    if isinstance(error, status.Refusal):
        return error
    logger.exception("a handler failed")
    return status.internal("the service has an internal error; its log has the details")


def _running() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


class Calls:
    """All calls of this front end."""

    def __init__(self, limits: CallLimits, *, is_shared: bool, tuning: Tuning = ON) -> None:
        """`is_shared`: whether several tenants call."""
        self._limits = limits
        self._releaser = Releaser(is_on=tuning.release)
        self._held = HeldRefusals(is_shared=is_shared)
        self._resets = Resets(is_on=tuning.resets)
        self.rooms = {room: _Places.of(room, limits, is_shared=is_shared) for room in Room}
        # The tenant of the call that a task serves.
        self._tenants: weakref.WeakKeyDictionary[asyncio.Task[Any], str] = weakref.WeakKeyDictionary()
        # The handler's task and end time of each call that is sending its answer, oldest first.
        self._finished: dict[asyncio.Task[Any], float] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        # Why a call was ended while its message was read, by its context.
        self._aborted: dict[Any, status.Refusal] = {}
        # Finished calls, without those whose caller may not make them, with an answer that had been unread for
        # UNREAD_SECONDS at the last sweep: by tenant, and those of health by connection.
        self.unread = Places(limits.max_unread, is_shared=is_shared)
        self.unread_health = Places(limits.max_unread_reserved, is_shared=True)
        # The connection of each call of health.
        self._connections: weakref.WeakKeyDictionary[asyncio.Task[Any], str] = weakref.WeakKeyDictionary()

    def handler(self, method: Method) -> Any:
        """The gRPC handler that serves `method`."""

        async def serve(_: object, context: Any) -> None:
            peer = context.peer()
            self._resets.begin(peer)
            record = None if method.log is None else method.log.begin(method.name, context)
            begun = asyncio.get_running_loop().time()
            ending: status.Refusal | grpc.StatusCode | None = grpc.StatusCode.CANCELLED
            try:
                try:
                    await self._serve(method, context)
                    ending = None
                except grpc.aio.InternalError:
                    # The caller is gone. grpc.aio logs nothing when a handler is cancelled.
                    raise asyncio.CancelledError from None
                except grpc.aio.AbortError:
                    ending = self._aborted.get(context)
                    raise
                except Exception as error:
                    ending = _refusal_of(error)
                if isinstance(ending, status.Refusal):
                    await self.refuse(context, ending, begun)
            finally:
                self._finish()
                self._resets.end(peer)
                self._aborted.pop(context, None)
                if method.log is not None:
                    method.log.end(record, ending)

        return cast(Any, grpc).stream_stream_rpc_method_handler(serve, response_serializer=method.serialize)

    async def refuse(self, context: Any, refusal: status.Refusal, begun: float) -> None:
        """Refuses the running task's call, at once or later. `begun`: when it began, on the loop's clock."""
        # The frames of the traceback have the call's message.
        refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        await self._held.hold(self._tenants.get(_running()), context, refusal, begun)
        status.refuse(context, refusal)

    def sweep(self, stalled: Collection["asyncio.Task[Any]"] = ()) -> None:
        """Ends calls with an overdue message, calls with an unread answer, and the calls of the `stalled` tasks.

        The owner calls this about once a second.
        """
        now = asyncio.get_running_loop().time()
        self._resets.sweep()
        for context, refusal in [each for places in self.rooms.values() for each in places.slots.ending()]:
            self._aborted[context] = refusal
            aborting = asyncio.create_task(self._abort(context, refusal))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
        ages = [(task, now - since) for task, since in self._finished.items()]
        unread = [task for task, age in ages if age >= UNREAD_SECONDS]
        self.unread_health.replace(Counter(self._connections[task] for task in unread if task in self._connections))
        own = [task for task in unread if task in self._tenants and task not in self._connections]
        self.unread.replace(Counter(self._tenants[task] for task in own))
        overdue = {task for task, age in ages if age >= self._limits.answer_seconds}
        # Whoever has no right to call must not use up the bound of the others.
        overdue.update(task for task in unread if task not in self._tenants)
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
        tenant = who = self._tenants[_running()] = method.enter(context)
        if method.room is not Room.BULK:
            who = context.peer()
        unread = "finished calls have answers that their clients have not read"
        if method.room is Room.HEALTH:
            self._connections[_running()] = who
            _check_room(self.unread_health, who, unread)
        else:
            _check_room(self.unread, tenant, unread)
        method.admit()
        data = await self._read(self.rooms[method.room], context, who)
        parsing.check_size(method.request, data, method.admit())
        method.scan(data)
        await method.turn(len(data))
        return parsing.parse(method.request, data)

    async def _read(self, places: "_Places", context: Any, who: str) -> bytes:
        _check_room(places.without_message, who, "calls have not sent their request yet")
        places.without_message.add(who, 1)
        try:
            await places.slots.take(context, who)
            try:
                data = await context.read()
            finally:
                places.slots.give_back(context)
        except (asyncio.CancelledError, grpc.aio.InternalError):
            self._resets.add(context.peer())
            raise
        finally:
            places.without_message.add(who, -1)
        if data is grpc.aio.EOF:
            # So does a reset that arrives before the read.
            self._resets.add(context.peer())
            raise status.invalid("request", "the call ended before it sent its request")
        return data

    async def _abort(self, context: Any, refusal: status.Refusal) -> None:
        # The handler's read raises the same AbortError.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError):
            await context.abort(refusal.code, refusal.message, refusal.metadata)

    def _finish(self) -> None:
        """Marks the running task's call as finished: it now only waits for the caller to read the last answer."""
        task = _running()
        if task not in self._finished:
            self._finished[task] = asyncio.get_running_loop().time()
            task.add_done_callback(self._finished.pop)
