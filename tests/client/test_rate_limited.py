"""The refusal of a tenant's limit per minute, from the core's answer to the client's exception."""

from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc.status import from_rejected
from tandem_client import errors
from tandem_client.wire.rpc_errors import ErrorReader


class _Error(grpc.RpcError):
    def __init__(self, rejected: frontend_pb2.Rejected) -> None:
        self._refusal = from_rejected(rejected, "r")

    def code(self) -> grpc.StatusCode:
        return self._refusal.code

    def details(self) -> str:
        return self._refusal.message

    def trailing_metadata(self) -> Any:
        return self._refusal.metadata

    def initial_metadata(self) -> Any:
        return ()


def read(code: frontend_pb2.RejectCode.ValueType, seconds: float) -> errors.TandemError:
    rejected = frontend_pb2.Rejected(code=code, message="the limit is 6 requests per minute", retry_seconds=seconds)
    return ErrorReader(address="a", timeout=None).read(_Error(rejected))


def test_a_rate_limit_is_an_error_of_its_own_that_says_when_to_come_back() -> None:
    limited, full = read(frontend_pb2.REJECT_CODE_RATE_LIMITED, 2.0001), read(frontend_pb2.REJECT_CODE_QUEUE_FULL, 0.0)
    assert type(limited) is errors.RateLimited and isinstance(limited, errors.QueueFull)
    assert type(full) is errors.QueueFull
    assert (limited.retry_after_seconds, full.retry_after_seconds) == (2.001, 0.5)
