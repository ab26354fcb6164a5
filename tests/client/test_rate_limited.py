"""The refusal of a tenant's limit per minute, from the core's answer to the client's exception."""

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc.status import from_rejected
from tandem_client import errors
from tandem_client.wire.rpc_errors import ErrorReader
from tests.client.test_connecting import GrpcError


def read(code: frontend_pb2.RejectCode.ValueType, seconds: float) -> errors.TandemError:
    rejected = frontend_pb2.Rejected(code=code, message="the limit is 6 requests per minute", retry_seconds=seconds)
    refusal = from_rejected(rejected, "r")
    error = GrpcError(refusal.code, refusal.message, refusal.metadata)
    return ErrorReader(address="a", timeout=None).read(error)


def test_a_rate_limit_is_an_error_of_its_own_that_says_when_to_come_back() -> None:
    limited, full = read(frontend_pb2.REJECT_CODE_RATE_LIMITED, 2.0001), read(frontend_pb2.REJECT_CODE_QUEUE_FULL, 0.0)
    assert type(limited) is errors.RateLimited and isinstance(limited, errors.QueueFull)
    assert type(full) is errors.QueueFull
    assert (limited.retry_after_seconds, full.retry_after_seconds) == (2.001, 0.5)
