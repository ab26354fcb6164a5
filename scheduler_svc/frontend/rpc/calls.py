"""Owns every call from its arrival to its end: reads its message, limits how long it may lack one, and ends it.

Knows nothing of what the methods do. Every method is served as a gRPC stream of bytes, so that a call can be refused
before its message is read, parsed or checked. Three phases of a call may last, and each has a bound: waiting for the
message, the method itself (its owner bounds it), and waiting for the caller to read the answer of a finished call.

From a call's bytes to a message: the size, the syntax, and that every field is known are checked. Unknown fields are
detected by size: a message shrinks when they are discarded. `UnknownFieldSet` creates an object for each field, which
takes seconds for a message of 4 MB, so it is used only to name the first unknown field of a small message.

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
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from scheduler_svc.frontend.grpc_tuning.ends import Releaser, Resets
from scheduler_svc.frontend.grpc_tuning.tuning import ON, Tuning
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gates import HeldRefusals, Places, ReadSlots
from tandem_contract.plural import counted, numbered

# The limit of control and health messages. In messages up to this size an unknown field is named.
MAX_SMALL_BYTES = 64 * 1024

Request = TypeVar("Request", bound=Message)


def check_size(kind: type[Message], data: bytes, max_bytes: int) -> None:
    """Refuses a message with too many bytes before it is parsed."""
    if len(data) > max_bytes:
        name = kind.DESCRIPTOR.name
        raise status.invalid(name, f"{name} has {len(data):,} bytes; the limit is {max_bytes:,}")


def parse(kind: type[Request], data: bytes) -> Request:
    """The message in `data`. Raises Refusal if the bytes are malformed or contain fields that this server lacks."""
    name = kind.DESCRIPTOR.name
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise status.invalid(name, f"the message of {counted(len(data), 'byte')} is not a valid {name}") from None
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    num_unknown = num_bytes - message.ByteSize()
    if not num_unknown:
        return message
    if len(data) > MAX_SMALL_BYTES:
        raise status.invalid(
            name, f"{name} has {counted(num_unknown, 'byte')} of fields that this server does not know"
        )
    owner, number = _first_unknown(kind.FromString(data)) or (name, 0)
    raise status.invalid(f"{owner}.{number}", f"{owner} has field number {number}, which this server does not know")


def _first_unknown(message: Message) -> tuple[str, int] | None:
    """The message name and number of the first unknown field.

    A map entry that contains an unknown field counts as an unknown field of the message that owns the map.
    """
    for unknown in UnknownFieldSet(message):
        return message.DESCRIPTOR.name, unknown.field_number
    for field, value in cast(Any, message).ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            if (found := _first_unknown(part)) is not None:
                return found
    return None


# Messages of control and health are small.
RESERVED_SECONDS = 3.0


class Room(StrEnum):
    """Methods whose calls share bounds. Calls of one room take nothing of another.

    Tenants share the bounds of BULK, and connections those of the others: monitors and operators call most when
    everything else is taken, and without tokens all callers are one tenant.
    """

    BULK = "bulk"
    CONTROL = "control"
    HEALTH = "health"
    REFLECTION = "reflection"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The bounds of one front end's calls."""

    # The service aborts a call if its message has not arrived after this time.
    message_seconds: float = 10.0
    # Calls that may wait for their message at once; the next one is refused. Each takes 24 KB.
    max_without_message: int = 2048
    # Messages that are read at once; each may take the largest message's memory until it is complete.
    max_reading: int = 64
    # The same two of each other room; a message is there after RESERVED_SECONDS.
    max_without_message_reserved: int = 512
    max_reading_reserved: int = 16
    # The service cancels a finished call if the caller has not read the answer after this time.
    answer_seconds: float = 60.0
    # While this many answers are unread, 25 to 80 KB each, every call but those of health is refused.
    max_unread: int = 2048
    # The same for health.
    max_unread_reserved: int = 512


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
    # Called with the context before anything else of the call. Returns the caller's tenant. Raises Refusal unless the
    # caller may call the method.
    enter: Callable[[Any], str]
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
    # Which bounds its calls share until their message is read.
    room: Room = Room.BULK
    # Whether a call may send further requests, each of which gets an answer. All are read before the time of an unread
    # answer is over.
    takes_more: bool = False
    # Called with the status of a call that is refused before `answer` is called.
    refused: Callable[[grpc.StatusCode], None] | None = None
    # The method's name, and who logs its calls.
    name: str = ""
    log: CallLog | None = None


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
                except status.Refusal as error:
                    ending = error
                except Exception:
                    logger.exception("a handler failed")
                    ending = status.internal("the service has an internal error; its log has the details")
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
                "%s cancelled: no client has read the answer for %g s",
                numbered(num_released, "call", "were"),
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
        while method.takes_more and (request := await self._request(method, context, is_first=False)) is not None:
            await context.write(await method.answer(request, context))

    async def _request(self, method: Method, context: Any, *, is_first: bool = True) -> Any:
        """Returns the call's message, None if a further one does not come. Raises Refusal if it is not admitted."""
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
        try:
            data = await self._read(self.rooms[method.room], context, who)
        except (asyncio.CancelledError, grpc.aio.InternalError):
            if is_first:
                self._resets.add(context.peer())
            raise
        if data is grpc.aio.EOF and not is_first:
            return None
        if data is grpc.aio.EOF:
            # So does a reset that arrives before the read.
            self._resets.add(context.peer())
            raise status.invalid("request", "the call ended before it sent its request")
        check_size(method.request, data, method.admit())
        method.scan(data)
        await method.turn(len(data))
        return parse(method.request, data)

    async def _read(self, places: "_Places", context: Any, who: str) -> Any:
        _check_room(places.without_message, who, "calls have not sent their request yet")
        places.without_message.add(who, 1)
        try:
            await places.slots.take(context, who)
            try:
                return await context.read()
            finally:
                places.slots.give_back(context)
        finally:
            places.without_message.add(who, -1)

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
