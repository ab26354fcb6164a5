"""Owns how a refusal or failure reaches the caller: the gRPC code, google.rpc details and retry hints of each.

Knows nothing of how requests run. Every outcome that is not an ordinary answer is a `Refusal`; `refuse` turns it into
the call's status.
"""

import functools
import math
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_status import rpc_status
from tandem.internal.v1 import frontend_pb2

# The delay before a retry that the service suggests to callers.
NOT_READY_RETRY_SECONDS = 1.0
QUEUE_FULL_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 86400.0


class Refusal(Exception):
    """Ends a call with `code`. `message` is one sentence with the number and the limit."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *details: Message,
        retry_after_seconds: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details
        self.retry_after_seconds = retry_after_seconds
        # A word for the log, if neither the code nor the core says why.
        self.reason = reason
        # Whether it ends an answer that had begun; otherwise the call is refused.
        self.ends_answer = False

    @functools.cached_property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The trailing metadata: google.rpc.Status, and the pushback that gRPC's own retries obey."""
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        pushback: tuple[tuple[str, str | bytes], ...] = ()
        if self.retry_after_seconds is not None:
            milliseconds = round(self.retry_after_seconds * 1000)
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(milliseconds)
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
            pushback = (("grpc-retry-pushback-ms", str(milliseconds)),)
        packed_status = rpc_status.to_status(status)  # pyright: ignore[reportUnknownMemberType] (untyped argument)
        return (*packed_status.trailing_metadata, *pushback)


def invalid(field: str, message: str) -> Refusal:
    """The value of a field is not accepted. The message names the field too."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, bad_request)


def unknown_model(name: str, served: str) -> Refusal:
    """The request names a model that is not served."""
    message = f"model {name[:128]!r} is not served here; {served!r} is"
    resource = error_details_pb2.ResourceInfo(resource_type="model", resource_name=name[:128], description=message)
    return Refusal(grpc.StatusCode.NOT_FOUND, message, resource, reason="unknown_model")


def not_ready(message: str, *, reason: str = "") -> Refusal:
    """The request is valid, and the caller may send it again later."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, message, retry_after_seconds=NOT_READY_RETRY_SECONDS, reason=reason)


def overloaded(message: str, seconds: float = QUEUE_FULL_RETRY_SECONDS) -> Refusal:
    """A bound of the service is reached. The caller may try again after `seconds`."""
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after_seconds=seconds)


def revoked() -> Refusal:
    """The proof of the caller is not valid any more, while its stream runs."""
    return Refusal(grpc.StatusCode.UNAUTHENTICATED, "the token or certificate of this call was revoked")


def internal(message: str, *details: Message) -> Refusal:
    """The service is at fault."""
    return Refusal(grpc.StatusCode.INTERNAL, message, *details)


def _pause(seconds: float) -> float:
    """The core's estimate; in seconds, MAX_RETRY_SECONDS at most, 0 if it is NaN."""
    return min(max(seconds, 0.0), MAX_RETRY_SECONDS) if seconds == seconds else 0.0


def from_rejected(rejected: frontend_pb2.Rejected, request_id: str) -> Refusal:
    """The refusal of a request that the core did not admit."""
    message = rejected.message
    match rejected.code:
        case frontend_pb2.REJECT_CODE_INVALID:
            return invalid(rejected.field, message)
        case frontend_pb2.REJECT_CODE_DUPLICATE | frontend_pb2.REJECT_CODE_NOT_FOUND:
            resource = error_details_pb2.ResourceInfo(
                resource_type="request", resource_name=request_id, description=message
            )
            is_known = rejected.code == frontend_pb2.REJECT_CODE_DUPLICATE
            code = grpc.StatusCode.ALREADY_EXISTS if is_known else grpc.StatusCode.NOT_FOUND
            return Refusal(code, message, resource)
        case frontend_pb2.REJECT_CODE_QUEUE_FULL:
            return overloaded(message, _pause(rejected.retry_seconds) or QUEUE_FULL_RETRY_SECONDS)
        case frontend_pb2.REJECT_CODE_RATE_LIMITED:
            violation = error_details_pb2.QuotaFailure.Violation(subject="tenant", description=message)
            quota = error_details_pb2.QuotaFailure(violations=[violation])
            # Rounded up to milliseconds, so that a caller that waits is accepted.
            pause = math.ceil(_pause(rejected.retry_seconds) * 1000) / 1000
            return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, quota, retry_after_seconds=pause)
        case frontend_pb2.REJECT_CODE_QUARANTINED:
            info = error_details_pb2.RequestInfo(request_id=request_id)
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, message, info)
        case frontend_pb2.REJECT_CODE_NOT_READY:
            return not_ready(message)
        case _:
            return internal(f"the core rejected request {request_id!r}: {message}")


def from_failure(failure: frontend_pb2.Failure, request_id: str) -> Refusal:
    """The failure of an admitted request; the caller gets it after the tokens that were delivered."""
    message = f"request {request_id!r}: {failure.message}"
    info = error_details_pb2.RequestInfo(request_id=request_id)
    match failure.code:
        case frontend_pb2.FAILURE_CODE_DEADLINE:
            return Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, message, info)
        case frontend_pb2.FAILURE_CODE_SHUTDOWN | frontend_pb2.FAILURE_CODE_NO_WORKER:
            # The request has ended, so a caller that could resume it must not try.
            return Refusal(grpc.StatusCode.UNAVAILABLE, message, info, retry_after_seconds=NOT_READY_RETRY_SECONDS)
        case _:
            return internal(message, info)


def refuse(context: Any, refusal: Refusal) -> None:
    """Sets `refusal` as the status that the call ends with when its handler returns."""
    context.set_code(refusal.code)
    context.set_details(refusal.message)
    context.set_trailing_metadata(refusal.metadata)


def seconds_left(context: Any) -> float:
    """The seconds until the caller's deadline; 0 without a deadline. Raises Refusal if the deadline has passed."""
    # None without a deadline, although the stubs promise a float.
    seconds = context.time_remaining()
    if seconds is None:
        return 0.0
    if seconds <= 0:
        raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the request was admitted")
    return seconds
