"""What can go wrong, as exceptions: one class for each kind of failure.

Owns the classes and what they carry. `rpc_errors` makes them of gRPC's errors.
"""

from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that the service refused, and why."""

    field: str
    description: str


class TandemError(Exception):
    """The base class; raised itself for a gRPC status without a class of its own."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_seconds: float | None = None,
        keyword: str | None = None,
        service_message: str | None = None,
        stream_began: bool = False,
    ) -> None:
        super().__init__(message)
        # Names options by their keywords: `max_new_tokens is 0; …`.
        self.message = message
        # In the service's own words, which name fields by their paths: `stop.max_new_tokens is 0; …`.
        self.service_message = message if service_message is None else service_message
        self.code = code
        self.violations = violations
        # The pause that the service asks for before another try; None: another try is not known to help.
        self.retry_after_seconds = retry_after_seconds
        # The keyword of the option at fault (`top_p`, `stop[0]`); None where no single option is.
        self.keyword = keyword
        # Whether the service had accepted the request, so that some tokens may have come.
        self.stream_began = stream_began

    @property
    def field(self) -> str | None:
        """The path of the field at fault, as the protos name it (`sampling.top_p`); None where no single field is."""
        return self.violations[0].field if self.violations else None


class InvalidArgument(TandemError):
    """The request is wrong; `keyword` and `field` say where, the message gives the number and the limit."""


class NotFound(TandemError):
    """The service does not serve a model of that name."""


class AlreadyExists(TandemError):
    """A live request has the same id."""


class QueueFull(TandemError):
    """The service's queue is full; `retry_after_seconds` says when to try again."""


class MessageTooLarge(InvalidArgument):
    """One message has more bytes than the service accepts (its max_message_bytes); a retry does not help."""


class Unavailable(TandemError):
    """The service cannot be reached, has no worker yet, is stopping, or went away."""


class NothingAnswers(Unavailable):
    """No process listens at the address, or what listens there does not speak gRPC."""


class AnswersTooSlowly(Unavailable):
    """The host did not complete the connection within the client's limit of 20 s."""


class DeadlineExceeded(TandemError):
    """`timeout` passed before the call was done."""


class Cancelled(TandemError):
    """The service ended the call. (Closing one's own stream raises nothing.)"""


class Internal(TandemError):
    """The service failed, or failed on this request."""


class ProtocolError(TandemError):
    """The stream breaks the API's own rules: a gap in its tokens, or no Summary at its end."""
