"""What can go wrong, as exceptions: one class per gRPC status, filled from the google.rpc details that travel with it.

Owns the mapping from status to class. Knows nothing of channels, streams or retries.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# In gRPC's own words for a message beyond a limit, which it ends with a full queue's status and no details.
_TOO_LARGE = "message larger than max"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that the service refused, and why."""

    field: str
    description: str


class TandemError(Exception):
    """The base of all of them; raised itself for a status that has no class of its own."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.violations = violations
        # What the service asks for before another try; None where another try is not known to help.
        self.retry_after_seconds = retry_after_seconds
        # Whether it ended a stream that the service had accepted: tokens may have come.
        self.stream_began = False

    @property
    def field(self) -> str | None:
        """The field at fault, as the protos name it (`sampling.top_p`); None where no single one is."""
        return self.violations[0].field if self.violations else None


class InvalidArgument(TandemError):
    """The request itself is wrong; `field` says where, the message the number and the limit."""


class NotFound(TandemError):
    """The service serves no model of that name."""


class AlreadyExists(TandemError):
    """A live request has the same id."""


class QueueFull(TandemError):
    """The service holds as many requests as it may; `retry_after_seconds` says when to come back."""


class MessageTooLarge(InvalidArgument):
    """One message holds more bytes than the service takes (its max_message_bytes); trying again does not help."""


class Unavailable(TandemError):
    """No service answers there, or it has no worker yet, or it is stopping."""


class DeadlineExceeded(TandemError):
    """`timeout` is over."""


class Cancelled(TandemError):
    """The service ended the call; abandoning one's own stream raises nothing."""


class Internal(TandemError):
    """The service broke, or broke on this very request."""


class ProtocolError(TandemError):
    """A stream that breaks the API's own rules: a gap in the tokens, or no Summary at its end."""


_CLASSES: Mapping[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: Internal,
}


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """The exception that says what a gRPC error says."""
    code = error.code()
    metadata = _metadata(error)
    violations: list[FieldViolation] = []
    retry_after_seconds: float | None = None
    for detail in _status(metadata).details:
        bad_request = error_details_pb2.BadRequest()
        retry_info = error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [
                FieldViolation(field=violation.field, description=violation.description)
                for violation in bad_request.field_violations
            ]
        elif detail.Unpack(retry_info):
            retry_after_seconds = retry_info.retry_delay.ToTimedelta().total_seconds()
    if retry_after_seconds is None:
        retry_after_seconds = _pushback_seconds(metadata)
    message = error.details() or code.name
    kind = _CLASSES.get(code, TandemError)
    if kind is QueueFull and retry_after_seconds is None and _TOO_LARGE in message:
        kind = MessageTooLarge
    return kind(
        message,
        code=code,
        violations=tuple(violations),
        retry_after_seconds=retry_after_seconds,
    )


def not_ready(address: str, timeout: float | None, reason: str) -> DeadlineExceeded:
    """The exception of a wait for a service that did not come up."""
    return DeadlineExceeded(
        f"{address} is not ready after {timeout} s: {reason}", code=grpc.StatusCode.DEADLINE_EXCEEDED
    )


def _metadata(error: grpc.RpcError) -> dict[str, str | bytes]:
    # Absent where the channel failed before the service was reached; pairs in both kinds of channel.
    pairs = cast(Iterable[tuple[str, str | bytes]] | None, cast(Any, error).trailing_metadata())
    return dict(pairs or ())


def _status(metadata: Mapping[str, str | bytes]) -> status_pb2.Status:
    raw = metadata.get(_DETAILS_KEY, b"")
    try:
        return status_pb2.Status.FromString(raw if isinstance(raw, bytes) else raw.encode())
    except DecodeError:
        return status_pb2.Status()


def _pushback_seconds(metadata: Mapping[str, str | bytes]) -> float | None:
    try:
        milliseconds = int(metadata[_PUSHBACK_KEY])
    except (KeyError, ValueError):
        return None
    # Negative is gRPC's way to say: do not try again.
    return milliseconds / 1000 if milliseconds >= 0 else None
