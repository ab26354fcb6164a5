"""How the calls of a method are served, and the bounds of all calls, as plain data. `calls` acts on them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import grpc

from scheduler_svc.frontend.rpc import status

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
    # Called with the status of a call that is refused before `answer` is called.
    refused: Callable[[grpc.StatusCode], None] | None = None
    # The method's name, and who logs its calls.
    name: str = ""
    log: CallLog | None = None
