"""Statuses to exceptions, what they carry, and when the client tries again by itself."""

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from tandem.v1 import inference_pb2

from client import AsyncClient, Client, errors
from tests.client import fake_service
from tests.client.fake_service import Ending, FakeService, bad_request, retry_info


class Failing:
    """Fails so many calls, then works."""

    def __init__(self, times: int, code: grpc.StatusCode, message: str, *details: Message, late: bool = False):
        self.calls = 0
        self._times = times
        self._failure = (code, message, *details)
        self._late = late

    def __call__(
        self, request: inference_pb2.GenerateRequest, ending: Ending
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.calls += 1
        if self.calls > self._times:
            yield from fake_service.one_completion(request, ending)
            return
        if self._late:
            yield fake_service.accepted(request)
            yield fake_service.delta(0, [5], "R")
        fake_service.fail(ending.context, *self._failure)


ALWAYS = 1_000_000
CASES = [
    (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
    (grpc.StatusCode.NOT_FOUND, errors.NotFound),
    (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExists),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QueueFull),
    (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
    (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
    (grpc.StatusCode.CANCELLED, errors.Cancelled),
    (grpc.StatusCode.INTERNAL, errors.Internal),
    (grpc.StatusCode.UNIMPLEMENTED, errors.TandemError),
]


@pytest.mark.parametrize(("code", "kind"), CASES)
def test_each_status_has_its_class(
    service: FakeService, client: Client, code: grpc.StatusCode, kind: type[errors.TandemError]
) -> None:
    service.behaviour = Failing(ALWAYS, code, "what happened")
    with pytest.raises(errors.TandemError) as caught:
        list(client.generate("hi"))
    assert type(caught.value) is kind
    assert str(caught.value) == "what happened"
    assert caught.value.code == code
    assert caught.value.field is None
    assert caught.value.retry_after_seconds is None


def test_details_are_read_in_both_clients(service: FakeService, client: Client) -> None:
    details = (bad_request("sampling.top_p", "top_p is 3; at most 1"), retry_info(1.5))
    service.behaviour = Failing(ALWAYS, grpc.StatusCode.INVALID_ARGUMENT, "top_p is 3", *details)

    async def read() -> None:
        async with AsyncClient(service.address) as async_client:
            async for _ in async_client.generate("hi"):
                pass

    for attempt in (lambda: list(client.generate("hi")), lambda: asyncio.run(read())):
        with pytest.raises(errors.InvalidArgument) as caught:
            attempt()
        assert caught.value.field == "sampling.top_p"
        assert caught.value.violations[0].description == "top_p is 3; at most 1"
        assert caught.value.retry_after_seconds == 1.5


def test_pushback_metadata_is_as_good_as_details(service: FakeService, client: Client) -> None:
    def full(request: inference_pb2.GenerateRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
        ending.context.set_trailing_metadata((("grpc-retry-pushback-ms", "250"),))
        ending.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 requests wait; the limit is 1024")
        yield from ()

    service.behaviour = full
    with pytest.raises(errors.QueueFull) as caught:
        list(client.generate("hi"))
    assert caught.value.retry_after_seconds == 0.25


def test_a_message_beyond_the_limit_is_no_full_queue(service: FakeService, client: Client) -> None:
    too_long = "x" * (4 * 2**20 + 1)

    async def read() -> None:
        async with AsyncClient(service.address) as async_client:
            async for _ in async_client.generate(too_long):
                pass

    for attempt in (lambda: list(client.generate(too_long)), lambda: asyncio.run(read())):
        with pytest.raises(errors.MessageTooLarge, match="larger than max") as caught:
            attempt()
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not caught.value.stream_began


def test_a_service_that_is_not_ready_is_asked_again(service: FakeService) -> None:
    service.behaviour = failing = Failing(2, grpc.StatusCode.UNAVAILABLE, "no worker", retry_info(0.02))
    with Client(service.address, max_retries=2) as client:
        assert len(list(client.generate("hi"))) == 2
    assert failing.calls == 3

    async def read() -> int:
        async with AsyncClient(service.address, max_retries=2) as async_client:
            return len([delta async for delta in async_client.generate("hi")])

    service.behaviour = failing = Failing(2, grpc.StatusCode.UNAVAILABLE, "no worker", retry_info(0.02))
    assert asyncio.run(read()) == 2
    assert failing.calls == 3


@pytest.mark.parametrize(
    ("retries", "timeout", "code", "details", "late", "calls"),
    [
        pytest.param(2, None, grpc.StatusCode.UNAVAILABLE, [retry_info(0.01)], False, 3, id="bounded"),
        pytest.param(0, None, grpc.StatusCode.UNAVAILABLE, [retry_info(0.01)], False, 1, id="switched off"),
        pytest.param(9, None, grpc.StatusCode.UNAVAILABLE, [], False, 1, id="no hint when to come back"),
        pytest.param(9, None, grpc.StatusCode.RESOURCE_EXHAUSTED, [retry_info(0.01)], False, 1, id="queue full"),
        pytest.param(9, None, grpc.StatusCode.UNAVAILABLE, [retry_info(0.01)], True, 1, id="tokens came"),
        pytest.param(9, 5.0, grpc.StatusCode.UNAVAILABLE, [retry_info(60)], False, 1, id="no time for another"),
    ],
)
def test_retries_end(
    service: FakeService,
    retries: int,
    timeout: float | None,
    code: grpc.StatusCode,
    details: list[Message],
    late: bool,
    calls: int,
) -> None:
    service.behaviour = failing = Failing(ALWAYS, code, "no", *details, late=late)
    with Client(service.address, max_retries=retries) as client, pytest.raises(errors.TandemError) as caught:
        list(client.generate("hi", timeout=timeout))
    assert caught.value.code == code
    assert failing.calls == calls


def test_the_timeout_ends_a_stream_at_both_ends(service: FakeService, client: Client) -> None:
    service.behaviour = fake_service.endless
    with pytest.raises(errors.DeadlineExceeded):
        list(client.generate("hi", timeout=0.1))
    assert service.endings[0].wait()


def test_nobody_there(service: FakeService) -> None:
    service.stop()
    with Client(service.address) as client:
        with pytest.raises(errors.Unavailable) as caught:
            client.load()
        assert caught.value.retry_after_seconds is None
        with pytest.raises(errors.DeadlineExceeded, match=r"not ready after 0\.05 s: nothing answers"):
            client.wait_ready(0.05)


def test_waiting_for_a_service_that_does_not_serve_yet(service: FakeService, client: Client) -> None:
    service.serving(False)
    assert client.health() is False
    with pytest.raises(errors.DeadlineExceeded, match="answers, but does not serve"):
        client.wait_ready(0.1)

    async def wait() -> None:
        async with AsyncClient(service.address) as async_client:
            assert await async_client.health() is False
            with pytest.raises(errors.DeadlineExceeded, match="answers, but does not serve"):
                await async_client.wait_ready(0.1)
            waiting = asyncio.create_task(async_client.wait_ready(fake_service.WAIT_SECONDS))
            await asyncio.sleep(0)
            service.serving(True)
            await waiting

    asyncio.run(wait())
    started = time.monotonic()
    client.wait_ready(fake_service.WAIT_SECONDS)
    assert client.health() is True
    assert time.monotonic() - started < fake_service.WAIT_SECONDS


def test_bytes_that_are_no_details_are_no_details(service: FakeService, client: Client) -> None:
    def garbled(request: inference_pb2.GenerateRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
        ending.context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        ending.context.abort(grpc.StatusCode.INTERNAL, "broken")
        yield from ()

    service.behaviour = garbled
    with pytest.raises(errors.Internal, match="broken"):
        list(client.generate("hi"))
