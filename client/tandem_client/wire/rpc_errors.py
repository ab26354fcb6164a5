"""Turns gRPC's errors into the client's: class, message, wrong field and pause before a retry.

Owns how a status, its google.rpc details and gRPC's own texts are read, and how paths of API fields
(`stop.stop_strings[0]`) in messages become keywords or flags; each caller has its own table of names. Knows nothing of
channels, streams or retries.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from tandem_client import errors
from tandem_contract.plural import counted

_INDEX = re.compile(r"\[\d+\]")
# A field that would help: "set force to let its requests end there".
_TO_SET = re.compile(r"(?<=\bset )[a-z_]+\b")

_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

_CLASSES: Mapping[grpc.StatusCode, type[errors.TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Quarantined,
    grpc.StatusCode.ABORTED: errors.Replaced,
    grpc.StatusCode.INTERNAL: errors.Internal,
}

# gRPC's own texts, which have no google.rpc details: a message above a size limit, with the status of a full queue; a
# deadline that passed in the client; a failed connection.
_TOO_LARGE = re.compile(r"(?P<side>CLIENT|SERVER): (?P<way>Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")
_CLIENT_DEADLINE = "Deadline Exceeded"
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses|connections to all backends failing|errors resolving|DNS resolution failed"
)
_SLOW_CONNECTION = re.compile(r"(failed to connect|connections to all backends).*(timed out|timeout)", re.I | re.DOTALL)
_HTTP_1 = re.compile(r"Trying to connect an http1")
# The connection was accepted and the handshake failed. `peer` finds out what listens there.
_OTHER_PROTOCOL = re.compile(
    r"Failed parsing HTTP/2|handshake failed|verification check failed|Socket closed"
    r"|[Cc]onnection reset|Broken pipe|\bEOF\b|GOAWAY",
)
# The channel was closed while the call was on its way.
_CLOSED = re.compile(r"Channel closed!|Cannot invoke RPC on closed channel")
# What gRPC's library says of a connection that breaks during a call: status, text, and our words before it.
_RAW = (
    # Nothing came any more.
    ("UNAVAILABLE", re.compile(r"(ping|keepalive) timeout"), "does not answer any more"),
    ("UNAVAILABLE", re.compile(r"too_many_pings"), "closed the connection because of its pings"),
    (
        "UNAVAILABLE",
        re.compile(r"GOAWAY|[Ss]ocket closed|[Cc]onnection (reset|aborted)|Broken pipe|\bEOF\b|Stream removed"),
        "closed the connection",
    ),
    # A proxy lost its connection to the service in the middle of an answer, and has no other way to say so.
    ("INTERNAL", re.compile(r"RST_STREAM with error code 2\b"), "lost the connection to the service"),
    ("INTERNAL", re.compile(r"RST_STREAM"), "ended the call without a status"),
    ("UNKNOWN", re.compile(r"Stream removed"), "ended the call without a status"),
)
# The last part of the text is the cause:
# "… last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect …: Connection refused".
_CAUSE = re.compile(r".*: (?P<cause>[^\[\]]+)\]?$", re.DOTALL)


def name_of(field: str, names: Mapping[str, str]) -> str:
    """Returns the name of a path, with its indices: `stop.stop_strings[0]` is `stop[0]`. Keeps an unknown path.

    Of a path inside a field that is known, `constraint.json_schema.properties.a`, the longest known beginning is
    replaced. An entry of the table has empty brackets for an index: `chat.messages[].tool_calls[].name`.
    """
    path = field
    while (named := names.get(_INDEX.sub("[]", path))) is None:
        cut = max(path.rfind("."), path.rfind("["))
        # The first word alone may be an ordinary one.
        if cut < 0 or (path[cut] == "." and "." not in path[:cut]):
            return field
        path = path[:cut]
    indices = iter(_INDEX.findall(path))
    return re.sub(r"\[\]", lambda _: next(indices, "[]"), named) + field[len(path) :]


def with_names(message: str, names: Mapping[str, str], *, field: str | None = None) -> str:
    """Returns the message with each path replaced by its name.

    A path without a dot may be an ordinary word. It is replaced behind "set", and at the message's start if `field`,
    the field at fault, is that path.
    """
    if field is not None and message.startswith(field):
        message = name_of(field, names) + message[len(field) :]
    message = _TO_SET.sub(lambda match: names.get(match[0], match[0]), message)
    dotted = sorted((path for path in names if "." in path and "[" not in path), key=len, reverse=True)
    if not dotted:
        return message
    paths = "|".join(map(re.escape, dotted))
    return re.sub(rf"(?<![\w.])(?:{paths})(?!\w)", lambda match: names[match[0]], message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReader:
    """Makes the exceptions of one call."""

    address: str
    # The limit in seconds for all tries of the call together; None means no limit.
    timeout: float | None
    # The path of an API field, to the keyword that sets the field.
    keywords: Mapping[str, str] = field(default_factory=dict[str, str])

    def read(
        self, error: grpc.RpcError, *, stream_began: bool = False, is_late: bool = False, why_late: str = ""
    ) -> errors.TandemError:
        """Returns the exception for a gRPC error. `stream_began`: the service had accepted the request.

        `is_late`: the time of the call is over, and `why_late` ends the message of that. The service knows the deadline
        too, and a stream that it removes then may come before the client's own status.
        """
        code = error.code()
        # It is None if the channel failed before it reached the service. Both kinds of channel give pairs.
        pairs = cast(Iterable[tuple[str, str | bytes]] | None, cast(Any, error).trailing_metadata())
        metadata = dict(pairs or ())
        violations, retry_after_seconds, request_ended, is_rate = _details(metadata)
        if retry_after_seconds is None:
            retry_after_seconds = _pushback_seconds(metadata)
        said = error.details() or code.name
        path = violations[0].field if violations else None
        kind, message = _CLASSES.get(code, errors.TandemError), with_names(said, self.keywords, field=path)
        if kind is errors.QueueFull and is_rate:
            kind = errors.RateLimited
        if not violations and retry_after_seconds is None:
            if is_late and _of_connection(code, said) is not None:
                kind, said = errors.DeadlineExceeded, _CLIENT_DEADLINE
            if kind is errors.DeadlineExceeded and _CLIENT_DEADLINE in said:
                message = self._deadline_message(stream_began=stream_began) + why_late
            else:
                kind, message = self._own_words(kind, code, message)
        return kind(
            message,
            code=code,
            violations=violations,
            retry_after_seconds=retry_after_seconds,
            keyword=None if path is None else name_of(path, self.keywords),
            service_message=said if violations else message,
            stream_began=stream_began,
            is_refusal=_DETAILS_KEY in metadata,
            request_ended=request_ended,
        )

    def not_ready(self, reason: str) -> errors.DeadlineExceeded:
        """Returns the exception for a service that did not become ready within the timeout."""
        message = f"{self.address} is not ready after {self.timeout:g} s: {reason}"
        return errors.DeadlineExceeded(message, code=grpc.StatusCode.DEADLINE_EXCEEDED)

    def _own_words(
        self, kind: type[errors.TandemError], status: grpc.StatusCode, said: str
    ) -> tuple[type[errors.TandemError], str]:
        """Returns class and message of an error that gRPC's library itself reports; others stay unchanged."""
        if kind is errors.QueueFull and (match := _TOO_LARGE.search(said)) is not None:
            return errors.MessageTooLarge, _size_message(match)
        if kind is errors.Cancelled and _CLOSED.search(said):
            return errors.ClientClosed, "the client was closed during the call"
        if kind is errors.Unavailable and _NOT_CONNECTED.match(said):
            cause = _CAUSE.fullmatch(said)
            why = "" if cause is None else f": {cause['cause']}"
            if _HTTP_1.search(said):
                return errors.OtherProtocol, f"{self.address} {errors.NO_GRPC}"
            if _OTHER_PROTOCOL.search(said):
                return errors.OtherProtocol, f"{self.address} takes the connection and ends it{why}"
            if _SLOW_CONNECTION.match(said):
                return errors.AnswersTooSlowly, f"{self.address} answers too slowly{why}"
            return errors.NothingAnswers, f"nothing answers at {self.address}{why}"
        if (broken := _of_connection(status, said)) is not None:
            return errors.Unavailable, f"{self.address} {broken}: {said}"
        return kind, said

    def _deadline_message(self, *, stream_began: bool) -> str:
        within = "in time" if self.timeout is None else f"within {self.timeout:g} s"
        if stream_began:
            return f"the stream did not end {within}"
        return f"{self.address} answers too slowly: no answer {within}"


def _of_connection(status: grpc.StatusCode, said: str) -> str | None:
    """The words for a connection that broke during a call; None for any other error."""
    return next((words for name, text, words in _RAW if name == status.name and text.search(said)), None)


def _size_message(match: re.Match[str]) -> str:
    size, limit = counted(int(match.group(3)), "byte"), f"{int(match.group(4)):,}"
    if match["side"] == "SERVER":
        return f"the request has {size}; the service takes {limit} (max_message_bytes)"
    if match["way"] == "Sent":
        return f"the request has {size}; the client sends at most {limit}"
    return f"the answer has {size}; the client takes at most {limit}"


def _details(
    metadata: Mapping[str, str | bytes],
) -> tuple[tuple[errors.FieldViolation, ...], float | None, bool, bool]:
    """Returns the refused fields and the pause before a retry in seconds.

    Then whether an accepted request has ended, and whether a limit per minute refused the request.
    """
    violations: list[errors.FieldViolation] = []
    retry_after_seconds: float | None = None
    raw = metadata.get(_DETAILS_KEY, b"")
    try:
        status = status_pb2.Status.FromString(raw if isinstance(raw, bytes) else raw.encode())
    except DecodeError:
        return (), None, False, False
    request_ended = is_rate = False
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        retry_info = error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [
                errors.FieldViolation(field=violation.field, description=violation.description)
                for violation in bad_request.field_violations
            ]
        elif detail.Unpack(retry_info):
            retry_after_seconds = retry_info.retry_delay.ToTimedelta().total_seconds()
        request_ended |= detail.Unpack(error_details_pb2.RequestInfo())
        is_rate |= detail.Unpack(error_details_pb2.QuotaFailure())
    return tuple(violations), retry_after_seconds, request_ended, is_rate


def _pushback_seconds(metadata: Mapping[str, str | bytes]) -> float | None:
    try:
        milliseconds = int(metadata[_PUSHBACK_KEY])
    except (KeyError, ValueError):
        return None
    # A negative number is gRPC's way to ask for no retry.
    return milliseconds / 1000 if milliseconds >= 0 else None
