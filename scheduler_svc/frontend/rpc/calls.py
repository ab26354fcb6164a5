"""Owns every call from its arrival to its end: reads its message, limits how long it may lack one, and ends it.

Knows nothing of what the methods do. Every method is served as a gRPC stream of bytes, so that a call can be refused
before its message is read, parsed or checked. Three phases of a call may last, and each has a bound: waiting for the
message, the method itself (its owner bounds it), and waiting for the caller to read the answer of a finished call.

Once a call is read, gRPC lets its whole message in, however slowly it arrives; before, at most `options.WINDOW_BYTES`.
So few messages are read at once. The newest call of a tenant is read first: if calls stall, old ones are likely to
stall too. While a call waits, a message that has been read for YIELD_SECONDS gives up its place: one of the tenant with
the most places, or of the waiting tenant if no other has more.

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
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from scheduler_svc.frontend.grpc_tuning.ends import Releaser, Resets
from scheduler_svc.frontend.grpc_tuning.tuning import ON, Tuning
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate, HeldRefusals, Places
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
            if (inner := _first_unknown(part)) is not None:
                return inner
    return None


# Messages of control and health are small.
RESERVED_SECONDS = 3.0


class Room(StrEnum):
    """Methods that share the bounds of calls. Calls of one room take nothing of another.

    Tenants share the bounds of BULK, and connections those of the others: monitors and operators call most when
    everything else is taken, and without tokens all callers are one tenant.
    """

    BULK = "bulk"
    CONTROL = "control"
    HEALTH = "health"
    REFLECTION = "reflection"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
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
        """Returns the call's record, which the other methods get back."""

    def refused(self, record: Any, refusal: status.Refusal) -> None:
        """The service has decided to end the call with this refusal; its caller may get it later."""

    def end(self, record: Any, ending: status.Refusal | grpc.StatusCode | None) -> None:
        """`ending` is the call's refusal or gRPC code, None if it was served to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    request: type[Any]
    # Called with the context before anything else of the call. Returns the caller's tenant. Raises Refusal unless the
    # caller may call the method.
    enter: Callable[[Any], str]
    # Called before the message is read and again before it is parsed. Returns the request's size limit in bytes. Raises
    # Refusal if the call is not admitted.
    admit: Callable[[], int]
    # Called with the message's bytes before it is parsed. Raises Refusal if one of its parts is beyond its limit.
    scan: Callable[[bytes], None]
    # Takes the request and the context. Either writes its answers to the context or returns the only answer.
    answer: Callable[[Any, Any], Awaitable[Any]]
    serialize: Callable[[Any], bytes]
    # Called when the call was admitted, before its message is read. Raises Refusal if there is no place for it.
    let_in: Callable[[], None] | None = None
    # Where calls wait for their turn to be parsed, by the bytes of their messages. None: these are small.
    turns: Gate | None = None
    # Which bounds its calls share until their message is read.
    room: Room = Room.BULK
    # Whether a call may send further requests, each of which gets an answer. All are read before the time of an unread
    # answer is over.
    takes_more: bool = False
    # The method's name, and the log of its calls.
    name: str = ""
    log: CallLog | None = None


logger = logging.getLogger(__name__)

# Every answer is unread for a moment. Only answers that stay unread for this long are counted.
UNREAD_SECONDS = 1.0


def is_not_of_a_lost_caller(record: logging.LogRecord) -> bool:
    """A filter for the log: drops gRPC's tracebacks of writes to callers that are gone."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.partition(".")[0] == "grpc" and isinstance(error, grpc.aio.InternalError))


# A message of 4 MB is here in that time at 16 Mbit/s.
YIELD_SECONDS = 2.0
YIELD_LOOKS = 2


@dataclass(slots=True, eq=False)
class Call:
    """A call that is served. Times are on the loop's clock."""

    context: Any
    task: "asyncio.Task[Any]"
    arrived_at: float
    # None: its caller is unknown, or may not make it.
    tenant: str | None = None
    # What it counts by while its message is not here: its tenant or its connection. And where, and by what, while its
    # answer is unread.
    key: str = ""
    unread: tuple[Places, str] | None = None
    # Since when it lacks its message, and since when that is read; how often it was found unfinished, because after a
    # pause of the process its bytes may be here, unread; and why it is ended.
    lacks_since: float = 0.0
    began_at: float = 0.0
    num_looks: int = 0
    aborted: status.Refusal | None = None
    # Since when it only waits for its caller to read the last answer.
    finished_at: float | None = None


class Reading:
    def __init__(self, max_without_message: int, max_reading: int, seconds: float, *, is_shared: bool) -> None:
        """`seconds`: the time of a call until its message is here. `is_shared`: whether its calls have several keys."""
        without = Bound(
            most=max_without_message, is_shared=is_shared, thing="call", state="have not sent their request yet"
        )
        self.without_message = Places(without)
        self._gate = Gate(Bound(most=max_reading, is_shared=is_shared), newest_first=True)
        self._seconds = seconds
        self._at_once = f"{numbered(max_reading, 'message', 'are')} read at once"
        # The oldest first.
        self._calls: dict[Call, None] = {}

    async def read(self, call: Call) -> Any:
        """Returns the call's message. Raises Refusal (RESOURCE_EXHAUSTED) if it has waited too long to be read."""
        now = asyncio.get_running_loop().time
        call.lacks_since = now()
        with self.without_message.taking(call.key):
            try:
                await self._gate.enter(call.key, seconds=self._seconds)
            except TimeoutError:
                these = f"{self._gate.inside.of(call.key)} of the same caller are not complete"
                message = f"the call's message could not be read for {self._seconds:g} s: {self._at_once}, and {these}"
                raise status.overloaded(message) from None
            call.num_looks, call.began_at = 0, now()
            self._calls[call] = None
            try:
                return await call.context.read()
            finally:
                del self._calls[call]
                self._gate.leave(call.key)

    def sweep(self) -> list[Call]:
        """The calls that must end now without their message; `aborted` says why. The owner asks about once a second."""
        now = asyncio.get_running_loop().time()
        live, slow = [call for call in self._calls if call.aborted is None], dict[Call, None]()
        for call in live:
            call.num_looks += 1
            if now - call.lacks_since >= self._seconds:
                why = f"the call sent no message for {self._seconds:g} s"
                call.aborted = status.Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, why)
            elif call.num_looks >= YIELD_LOOKS and now - call.began_at >= YIELD_SECONDS:
                slow[call] = None
        self._let_yield(slow)
        return [call for call in live if call.aborted is not None]

    def _let_yield(self, slow: dict[Call, None]) -> None:
        """Aborts as many of these calls as others wait."""
        num_of = self._gate.inside.of
        for waiting, num in self._gate.waiting.items():
            for _ in range(num):
                most = max((call.key for call in slow), key=num_of, default=waiting)
                owner = most if num_of(most) > num_of(waiting) + 1 else waiting
                call = next((call for call in slow if call.key == owner), None)
                if call is None:
                    break
                del slow[call]
                why = f"the message was not here after {YIELD_SECONDS:g} s, and other calls wait to be read"
                call.aborted = status.overloaded(f"{why}; {self._at_once}")


class Calls:
    def __init__(self, limits: CallLimits, *, is_shared: bool, tuning: Tuning = ON) -> None:
        """`is_shared`: whether several tenants call."""
        self._limits = limits
        self._releaser = Releaser(is_on=tuning.release)
        self._held = HeldRefusals(is_shared=is_shared)
        self._resets = Resets(is_on=tuning.resets)
        seconds = min(RESERVED_SECONDS, limits.message_seconds)
        reserved = limits.max_without_message_reserved, limits.max_reading_reserved, seconds
        self.rooms = {room: Reading(*reserved, is_shared=True) for room in Room}
        bulk = limits.max_without_message, limits.max_reading, limits.message_seconds
        self.rooms[Room.BULK] = Reading(*bulk, is_shared=is_shared)
        # The calls that are sending their answer, oldest first.
        self._finished: dict[Call, None] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        # Finished calls, without those that their caller may not make, with an answer that had been unread for
        # UNREAD_SECONDS at the last sweep: by tenant, and those of health by connection.
        unread = Bound(
            most=limits.max_unread,
            is_shared=is_shared,
            thing="finished call",
            state="have answers that their clients have not read",
        )
        self.unread = Places(unread)
        self.unread_health = Places(replace(unread, most=limits.max_unread_reserved, is_shared=True))

    def handler(self, method: Method) -> Any:
        async def serve(_: object, context: Any) -> None:
            task, peer = asyncio.current_task(), context.peer()
            assert task is not None
            self._resets.begin(peer)
            record = None if method.log is None else method.log.begin(method.name, context)
            call = Call(context, task, asyncio.get_running_loop().time())
            ending: status.Refusal | grpc.StatusCode | None = grpc.StatusCode.CANCELLED
            try:
                try:
                    await self._serve(method, call)
                    ending = None
                except grpc.aio.InternalError:
                    # The caller is gone. grpc.aio logs nothing when a handler is cancelled.
                    raise asyncio.CancelledError from None
                except grpc.aio.AbortError:
                    ending = call.aborted
                    raise
                except status.Refusal as error:
                    ending = error
                except Exception:
                    logger.exception("a handler failed")
                    ending = status.internal("the service has an internal error; its log has the details")
                if isinstance(ending, status.Refusal):
                    if method.log is not None:
                        method.log.refused(record, ending)
                    # The frames of the traceback have the call's message.
                    ending.__traceback__ = ending.__context__ = ending.__cause__ = None
                    await self._held.hold(call.tenant, context, ending, call.arrived_at)
                    status.refuse(context, ending)
            finally:
                self._finish(call)
                self._resets.end(peer)
                if method.log is not None:
                    method.log.end(record, ending)

        return cast(Any, grpc).stream_stream_rpc_method_handler(serve, response_serializer=method.serialize)

    def sweep(self, stalled: Collection["asyncio.Task[Any]"] = ()) -> None:
        """Ends overdue calls, calls with an unread answer, and those of the `stalled` tasks. Call it once a second."""
        now = asyncio.get_running_loop().time()
        self._resets.sweep()
        for call in [late for room in self.rooms.values() for late in room.sweep()]:
            aborting = asyncio.create_task(_abort(call))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
        ages = [(call, now - call.finished_at) for call in self._finished if call.finished_at is not None]
        unread = [call for call, age in ages if age >= UNREAD_SECONDS]
        where = [call.unread for call in unread if call.unread is not None]
        for places in (self.unread, self.unread_health):
            places.replace(Counter(key for owner, key in where if owner is places))
        overdue = {call.task for call, age in ages if age >= self._limits.answer_seconds}
        # A caller without the right to call must not use up the bound of the others.
        overdue.update(call.task for call in unread if call.tenant is None)
        if num_released := self._releaser.release(overdue.union(stalled)):
            logger.warning(
                "%s cancelled: no client has read the answer for %g s",
                numbered(num_released, "call", "were"),
                self._limits.answer_seconds,
            )

    async def _serve(self, method: Method, call: Call) -> None:
        request = await self._request(method, call)
        answer = await method.answer(request, call.context)
        if answer is not None:
            self._finish(call)
            await call.context.write(answer)
        while method.takes_more and (request := await self._request(method, call, is_first=False)) is not None:
            await call.context.write(await method.answer(request, call.context))

    async def _request(self, method: Method, call: Call, *, is_first: bool = True) -> Any:
        """Returns the call's message, None if a further one does not come. Raises Refusal if it is not admitted."""
        tenant = call.tenant = method.enter(call.context)
        call.key = tenant if method.room is Room.BULK else call.context.peer()
        unread, key = (self.unread_health, call.key) if method.room is Room.HEALTH else (self.unread, tenant)
        call.unread = unread, key
        unread.check(key)
        method.admit()
        if method.let_in is not None:
            method.let_in()
        try:
            data = await self.rooms[method.room].read(call)
        except (asyncio.CancelledError, grpc.aio.InternalError):
            if is_first:
                self._resets.add(call.context.peer())
            raise
        if data is grpc.aio.EOF and not is_first:
            return None
        if data is grpc.aio.EOF:
            # So does a reset that arrives before the read.
            self._resets.add(call.context.peer())
            raise status.invalid("request", "the call ended before it sent its request")
        check_size(method.request, data, method.admit())
        method.scan(data)
        if method.turns is not None:
            await method.turns.enter(tenant, len(data))
        return parse(method.request, data)

    def _finish(self, call: Call) -> None:
        """It now only waits for the caller to read the last answer."""
        if call.finished_at is None:
            call.finished_at = asyncio.get_running_loop().time()
            self._finished[call] = None
            call.task.add_done_callback(lambda _: self._finished.pop(call))


async def _abort(call: Call) -> None:
    assert call.aborted is not None
    # The handler's read raises the same AbortError.
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError):
        await call.context.abort(call.aborted.code, call.aborted.message, call.aborted.metadata)
