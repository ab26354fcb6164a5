"""The client's exceptions, one class for each kind of failure.

Owns the classes and their attributes. `rpc_errors` makes them from gRPC's errors. Imports gRPC with the first error
only, because commands that call nothing import this module too.
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

NO_GRPC = "speaks HTTP/1.1 and no gRPC: it may be the HTTP gateway; the service itself has another port"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that the service refused, and why."""

    field: str
    description: str


def _unknown() -> "grpc.StatusCode":
    from grpc import StatusCode

    return StatusCode.UNKNOWN


@dataclasses.dataclass(eq=False, repr=False)
class TandemError(Exception):
    """The base class, which is also raised for a gRPC status without a class of its own."""

    # Options are named by their keywords: `max_new_tokens is 0; …`.
    message: str
    _: dataclasses.KW_ONLY
    code: "grpc.StatusCode" = dataclasses.field(default_factory=_unknown)
    violations: tuple[FieldViolation, ...] = ()
    # The pause that the service asks for before another try; None if it asks for no other try.
    retry_after_seconds: float | None = None
    # The keyword of the wrong option (`top_p`, `stop[0]`); None if no single option is wrong.
    keyword: str | None = None
    # The service's own text, which names fields by their paths: `stop.max_new_tokens is 0; …`.
    service_message: str = ""
    # Whether the service had accepted the request, so that some tokens may have arrived.
    stream_began: bool = False
    # Whether the service itself ended the call with this error, and not a connection that broke.
    is_refusal: bool = False
    # Whether the error is the answer to an accepted request, so that resuming it would give the same.
    request_ended: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.message)
        # Callers may give None for what they do not know.
        self.code = self.code or _unknown()
        self.service_message = self.service_message or self.message

    @property
    def field(self) -> str | None:
        """The path of the wrong field in the protos (`sampling.top_p`); None if no single field is wrong."""
        return self.violations[0].field if self.violations else None


class InvalidArgument(TandemError):
    """The request is wrong. `keyword` and `field` name the option, the message gives its value and the limit."""


class NotFound(TandemError):
    """The service does not serve a model of that name, or keeps no such request that could be resumed."""


class Unauthenticated(TandemError):
    """The service knows neither the client's token nor its certificate; the token may have expired."""


class PermissionDenied(TandemError):
    """The client's token or certificate has no right to make this call."""


class Replaced(TandemError):
    """Another reader resumed the request."""


class AlreadyExists(TandemError):
    """A live request has the same id."""


class QueueFull(TandemError):
    """The service's queue is full; `retry_after_seconds` is the pause before another try."""


class RateLimited(QueueFull):
    """The tenant has used up its requests or tokens per minute; `retry_after_seconds` says when more are accepted."""


class MessageTooLarge(InvalidArgument):
    """One message has more bytes than the service accepts (its max_message_bytes); a retry does not help."""


class Unavailable(TandemError):
    """The service cannot be reached, has no worker yet, is stopping, or went away."""


class NothingAnswers(Unavailable):
    """No process listens at the address, or what listens there does not speak gRPC."""


class OtherProtocol(NothingAnswers):
    """What listens at the address takes no such connection: other TLS, another certificate, or not gRPC."""


class AnswersTooSlowly(Unavailable):
    """The host did not complete the connection within the client's limit of 5 s."""


class DeadlineExceeded(TandemError):
    """`timeout` passed before the call was done."""


class Cancelled(TandemError):
    """The service cancelled the call. A stream that the client closes raises nothing."""


class Quarantined(TandemError):
    """The service refuses this request for a time, because it killed its workers when it ran before."""


class Internal(TandemError):
    """The service failed, or failed on this request."""


class ClientClosed(TandemError):
    """The client was closed before or during the call. Make a new one."""


class ClientForked(ClientClosed):
    """The client or the stream belongs to the parent of this process, and its connection too. Make a new client."""


class ProtocolError(TandemError):
    """The stream breaks the rules of the API, for example with a gap in its tokens or without a Summary at its end."""
