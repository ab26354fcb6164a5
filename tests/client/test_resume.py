"""Streams that continue after they were lost, and requests that are aborted because their caller gave them up."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from tandem.v1 import inference_pb2 as pb

from tandem_client import AsyncClient, Client
from tandem_client.client_base import Recovery
from tandem_client.errors import InvalidArgument, NothingAnswers, Replaced, TandemError, Unavailable
from tandem_client.sync_client import GenerateStream
from tandem_client.types import Delta
from tests.client import fake_service as fake
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService
from tests.client.test_streams import break_out, with_block

pytestmark = pytest.mark.usefixtures("patient_aborts")

# Two samples; the second one has ended.
HALF = (fake.delta(0, [5], "Ré"), fake.delta(0, [8, 9], "en", sample_idx=1), fake.finished(2, sample_idx=1))
half = fake.sending(*HALF, fake.breaks)
other_half = fake.sending(fake.delta(1, [6], "turn"), fake.finished(2, sample_idx=1), fake.finished(2), fake.summary(4))


def read(service: FakeService, connect: Connect) -> tuple[list[Delta], list[str]]:
    """Reads a stream. Returns its deltas, and the kinds of messages of another stream of the same behaviour."""
    with connect(service.address) as client:
        deltas = list(client.generate("hi", num_samples=2, resume=True))
        messages = client.generate("hi", num_samples=2, resume=True).messages()
        return deltas, [str(message.WhichOneof("event")) for message in messages]


@either
def test_a_lost_stream_continues_where_it_was(service: FakeService, connect: Connect) -> None:
    service.behaviour, service.resumption = half, other_half
    deltas, kinds = read(service, connect)
    assert [(delta.sample_idx, delta.token_offset, delta.token_ids, delta.text) for delta in deltas] == [
        (0, 0, (5,), "Ré"),
        (1, 0, (8, 9), "en"),
        (0, 1, (6,), "turn"),
    ]
    # As if nothing had happened: no second Accepted, no second Finished of a sample.
    assert kinds == ["accepted", "delta", "delta", "finished", "delta", "finished", "summary"]
    asked, again = service.resumed
    assert asked.request_id == service.requests[0].request_id != again.request_id
    assert asked.resume_secret == fake.SECRET
    assert list(asked.offsets) == [
        pb.SampleOffset(token_ids=1, text_chars=2),
        pb.SampleOffset(token_ids=2, text_chars=2),
    ]
    assert service.requests[0].resume.linger_seconds == 60.0
    assert service.aborted == []


@either
def test_a_stream_that_is_lost_again_continues_again(service: FakeService, connect: Connect) -> None:
    def lost_again(request: pb.ResumeRequest, ending: fake.Ending) -> fake.Messages:
        if request.offsets[0].token_ids == 2:
            return iter(list(other_half(request, ending))[2:])
        return fake.sending(fake.delta(1, [6], "turn"), fake.breaks)(request, ending)

    service.behaviour, service.resumption = half, lost_again
    deltas, _ = read(service, connect)
    assert "".join(delta.text for delta in deltas if not delta.sample_idx) == "Réturn"
    assert [request.offsets[0].token_ids for request in service.resumed] == [1, 2] * 2


@either
def test_a_connection_that_is_lost_after_the_summary_is_an_end(service: FakeService, connect: Connect) -> None:
    service.behaviour = fake.sending(*HALF, fake.delta(1, [6], "turn"), fake.finished(2), fake.summary(4), fake.breaks)
    service.resumption = other_half
    deltas, kinds = read(service, connect)
    assert len(deltas) == 3
    assert kinds == ["accepted", "delta", "delta", "finished", "delta", "finished", "summary"]
    assert (service.resumed, service.aborted) == ([], [])


def test_a_request_that_is_not_kept_raises_the_error_that_lost_it(service: FakeService, client: Client) -> None:
    service.behaviour = half
    with pytest.raises(Unavailable, match="Socket closed") as caught:
        list(client.generate("hi", num_samples=2, resume=True))
    assert caught.value.stream_began
    assert len(service.resumed) == 1


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.ABORTED, [], Replaced),
        (grpc.StatusCode.UNAVAILABLE, [error_details_pb2.RequestInfo(request_id="r")], Unavailable),
        (grpc.StatusCode.INTERNAL, [error_details_pb2.RequestInfo(request_id="r")], TandemError),
        (grpc.StatusCode.INVALID_ARGUMENT, [], InvalidArgument),
    ],
)
def test_the_end_of_a_request_is_not_resumed(
    service: FakeService, client: Client, code: grpc.StatusCode, details: list[Any], kind: type[TandemError]
) -> None:
    service.behaviour = fake.sending(fake.fails(code, "the reason", *details))
    with pytest.raises(kind, match="the reason"):
        list(client.generate("hi", resume=True))
    assert service.resumed == []


def test_a_stream_without_resume_is_not_continued(service: FakeService, client: Client) -> None:
    service.behaviour, service.resumption = half, other_half
    with pytest.raises(Unavailable):
        list(client.generate("hi", num_samples=2))
    with pytest.raises(Unavailable):
        list(client.generate("hi", num_samples=2, linger_seconds=5.0))
    assert service.resumed == []
    # A caller that keeps the secret may resume the second one by itself.
    assert service.aborted == []


def test_a_request_that_is_lost_before_it_is_accepted_is_aborted_and_sent_again(
    service: FakeService, client: Client
) -> None:
    def lost_at_first(request: pb.GenerateRequest, ending: fake.Ending) -> fake.Messages:
        if len(service.requests) == 1:
            fake.breaks(ending)
        return fake.one_completion(request, ending)

    service.behaviour = lost_at_first
    assert len(list(client.generate("hi", resume=True, request_id="mine"))) == 2
    assert [request.request_id for request in service.requests] == ["mine", "mine"]
    assert service.aborted == ["mine"]


def test_an_address_where_nobody_listens_is_reported_at_once(service: FakeService) -> None:
    service.stop()
    with Client(service.address) as client, pytest.raises(NothingAnswers):
        list(client.generate("hi", resume=True))


def interrupt(stream: GenerateStream) -> None:
    with pytest.raises(KeyboardInterrupt), stream:
        raise KeyboardInterrupt


def close_at_once(stream: GenerateStream) -> None:
    stream.close()
    stream.close()


@pytest.mark.parametrize("leave", [break_out, with_block, interrupt, close_at_once])
@pytest.mark.parametrize("options", [{"resume": True}, {"linger_seconds": 5.0}])
def test_a_request_that_lingers_is_aborted_when_its_caller_leaves(
    service: FakeService, client: Client, leave: Callable[[GenerateStream], None], options: dict[str, object]
) -> None:
    service.behaviour = fake.endless
    stream = client.generate("hi", **options)
    leave(stream)
    # `close` has waited for it.
    assert service.aborted == [stream._request.request_id]


def test_a_dropped_stream_is_aborted_before_its_client_closes(service: FakeService) -> None:
    service.behaviour = fake.endless
    with Client(service.address) as client:
        stream = client.generate("hi", request_id="mine", resume=True)
        next(stream)
        del stream
        gc.collect()
    assert service.aborted == ["mine"]


async def test_a_cancelled_task_aborts_its_request(service: FakeService) -> None:
    service.behaviour = fake.endless
    async with AsyncClient(service.address) as client:
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("hi", request_id="mine", resume=True):
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert service.aborted == ["mine"]


@pytest.mark.parametrize("options", [{}, {"resume": True}])
def test_a_stream_that_ended_is_not_aborted(service: FakeService, client: Client, options: dict[str, bool]) -> None:
    with client.generate("hi", **options) as stream:
        assert len(list(stream)) == 2
    stream.close()
    assert service.aborted == []


def lost(*, began: bool = True) -> Unavailable:
    return Unavailable("Socket closed", code=grpc.StatusCode.UNAVAILABLE, stream_began=began)


def test_a_recovery_ends_with_the_linger_time_and_its_pauses_grow() -> None:
    now = 100.0
    recovery = Recovery(10.0, clock=lambda: now)
    pauses: list[float] = []
    while (pause := recovery.pause_seconds(lost())) is not None:
        pauses.append(pause)
        now += pause
    assert 0.03 < pauses[0] < 0.07
    assert 0.7 < pauses[-1] < 1.3
    assert 108.0 < now < 110.0
    # The time and the pauses begin again after the stream went on.
    recovery.continued()
    now += 10.0
    pause = recovery.pause_seconds(lost())
    assert pause is not None and pause < 0.07
