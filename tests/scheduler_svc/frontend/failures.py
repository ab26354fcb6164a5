"""Owns the checks of a failed call: its status and its google.rpc details."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.fake_core import rest

Code = grpc.StatusCode


def refused(check: Callable[..., Any], *args: Any, **fields: Any) -> Refusal:
    """The Refusal that this check raises."""
    with pytest.raises(Refusal) as caught:
        check(*args, **fields)
    return caught.value


def field_of(refusal: Refusal) -> str:
    """The field that a Refusal names, of an invalid argument."""
    assert refusal.code is Code.INVALID_ARGUMENT
    [detail] = refusal.details
    assert isinstance(detail, error_details_pb2.BadRequest)
    [violation] = detail.field_violations
    assert violation.description == refusal.message
    return violation.field


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error of a call. Reads all messages of a streaming call first."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rest(call) if hasattr(call, "read") else call)
    return caught.value


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the words of a call that fails."""
    error = await failure(call)
    return error.code(), str(error.details())


async def fails(
    call: Any, code: grpc.StatusCode, words: str | None = None, *, retry: float | None = None, field: str | None = None
) -> str:
    """The words of a call that fails with this code, and with these words, this retry hint and this field if given."""
    error = await failure(call)
    found = str(error.details())
    assert (error.code(), found) == (code, found if words is None else words)
    if retry is not None:
        assert_retry_hint(error, retry)
    if field is not None:
        [bad] = details(error, error_details_pb2.BadRequest)
        assert [each.field for each in bad.field_violations] == [field]
    return found


def details(error: grpc.aio.AioRpcError, kind: type[Message]) -> list[Any]:
    """The google.rpc details of this kind."""
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.message == error.details()
    found: list[Any] = []
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


def assert_retry_hint(error: grpc.aio.AioRpcError, seconds: float) -> None:
    """Checks RetryInfo, which callers' code reads, and the pushback, which gRPC's own retries obey."""
    (info,) = details(error, error_details_pb2.RetryInfo)
    assert info.retry_delay.ToTimedelta().total_seconds() == seconds
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == str(round(seconds * 1000))
