"""Owns how a refusal or failure reaches the caller: the gRPC code, google.rpc details and retry hints of each.

Knows nothing of how requests run. Everything that is not an ordinary answer is a `Refusal`; `Answering` turns it into
the call's status.
"""

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from tandem.internal.v1 import frontend_pb2

logger = logging.getLogger(__name__)

# What callers are told to wait before they try again.
NOT_READY_RETRY_SECONDS = 1.0
QUEUE_FULL_RETRY_SECONDS = 0.5


class Refusal(Exception):
    """Ends a call with `code`. `message` is one sentence with the number and the limit."""

    def __init__(
        self, code: grpc.StatusCode, message: str, *details: Message, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = list(details)
        self.retry_after_seconds = retry_after_seconds

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Trailing metadata: google.rpc.Status, and the pushback that gRPC's own retries obey."""
        details = list(self.details)
        pushback: tuple[tuple[str, str | bytes], ...] = ()
        if self.retry_after_seconds is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(self.retry_after_seconds * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
            pushback = (("grpc-retry-pushback-ms", str(round(self.retry_after_seconds * 1000))),)
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        packed_status = rpc_status.to_status(status)  # pyright: ignore[reportUnknownMemberType] (untyped argument)
        return (*packed_status.trailing_metadata, *pushback)


def invalid(field: str, message: str) -> Refusal:
    """A field that cannot be accepted; the message names it too."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, bad_request)


def unknown_model(name: str, served: str) -> Refusal:
    """A model that is not served here."""
    message = f"model {name[:128]!r} is not served here; {served!r} is"
    resource = error_details_pb2.ResourceInfo(resource_type="model", resource_name=name[:128], description=message)
    return Refusal(grpc.StatusCode.NOT_FOUND, message, resource)


def not_ready(message: str) -> Refusal:
    """Nothing is wrong with the request; it may be sent again."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, message, retry_after_seconds=NOT_READY_RETRY_SECONDS)


def overloaded(message: str) -> Refusal:
    """A bound is reached."""
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after_seconds=QUEUE_FULL_RETRY_SECONDS)


def deadline_passed(message: str) -> Refusal:
    """The caller's deadline."""
    return Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, message)


def from_rejected(rejected: frontend_pb2.Rejected, request_id: str) -> Refusal:
    """What the core did not admit."""
    message = rejected.message
    match rejected.code:
        case frontend_pb2.REJECT_CODE_INVALID:
            return invalid(rejected.field, message)
        case frontend_pb2.REJECT_CODE_DUPLICATE:
            resource = error_details_pb2.ResourceInfo(
                resource_type="request", resource_name=request_id, description=message
            )
            return Refusal(grpc.StatusCode.ALREADY_EXISTS, message, resource)
        case frontend_pb2.REJECT_CODE_QUEUE_FULL:
            return overloaded(message)
        case frontend_pb2.REJECT_CODE_NOT_READY:
            return not_ready(message)
        case _:
            return Refusal(grpc.StatusCode.INTERNAL, f"request {request_id!r} was rejected: {message}")


def from_failure(failure: frontend_pb2.Failure, request_id: str) -> Refusal:
    """What ended an admitted request badly, after its delivered tokens."""
    message = f"request {request_id!r}: {failure.message}"
    info = error_details_pb2.RequestInfo(request_id=request_id)
    match failure.code:
        case frontend_pb2.FAILURE_CODE_DEADLINE:
            return Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, message, info)
        case frontend_pb2.FAILURE_CODE_SHUTDOWN | frontend_pb2.FAILURE_CODE_NO_WORKER:
            return not_ready(message)
        case _:
            return Refusal(grpc.StatusCode.INTERNAL, message, info)


class Answering:
    """`async with Answering(context)` around a handler: a Refusal becomes the call's status, other errors INTERNAL."""

    __slots__ = ("_context",)

    def __init__(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        # An InternalError of grpc: the caller is gone, and nobody is left to hear a status.
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.InternalError):
            return
        if not isinstance(error, Refusal):
            logger.error("a handler failed", exc_info=error)
            error = Refusal(grpc.StatusCode.INTERNAL, "an internal error; the service's log tells more")
        try:
            await self._context.abort(error.code, error.message, error.metadata())
        except grpc.aio.InternalError:
            # The caller left first, so nobody hears the status; a cancelled handler is what grpc.aio ends quietly.
            raise asyncio.CancelledError from None
