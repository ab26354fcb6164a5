"""`Client.resume`: a program continues a stream that another one began. Both clients do the same."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from tandem.v1 import inference_pb2 as pb

from tandem_client import AsyncClient, Client
from tandem_client.errors import InvalidArgument, NotFound, Replaced, TandemError, Unavailable
from tandem_client.types import Delta, SampleOffset
from tests.client import fake_service
from tests.client.both import Connect, either
from tests.client.fake_service import Ending, FakeService, breaks
from tests.client.test_resume import SECRET, accepted

pytestmark = pytest.mark.usefixtures("patient_aborts")

OFFSETS = (SampleOffset(token_ids=1, text_chars=2), SampleOffset(token_ids=2, text_chars=4))


def read(service: FakeService, connect: Connect, **options: Any) -> tuple[list[Delta], Any]:
    """Returns the deltas of a resumed stream, and the stream."""
    with connect(service.address) as client:
        stream = client.resume("mine", SECRET, **options)
        return list(stream), stream


def rest(request: pb.ResumeRequest, ending: Ending) -> Iterator[pb.GenerateResponse]:
    """The rest of two samples, of which the second was received in full."""
    yield accepted(request.request_id, 2)
    yield fake_service.delta(1, [6, 7], "turn")
    yield fake_service.finished(2, sample_idx=1)
    yield fake_service.finished(3)
    yield fake_service.summary(5)


@either
def test_a_stream_continues_beyond_its_offsets(service: FakeService, connect: Connect) -> None:
    service.resumption = rest
    deltas, stream = read(service, connect, offsets=OFFSETS)
    assert [(delta.sample_idx, delta.token_offset, delta.token_ids, delta.text) for delta in deltas] == [
        (0, 1, (6, 7), "turn")
    ]
    assert service.resumed == [
        pb.ResumeRequest(
            request_id="mine", resume_secret=SECRET,
            offsets=[pb.SampleOffset(token_ids=1, text_chars=2), pb.SampleOffset(token_ids=2, text_chars=4)],
        )
    ]  # fmt: skip
    assert (service.requests, service.aborted) == ([], [])
    first, second = stream.samples
    assert (first.token_ids, first.text, first.num_tokens) == ([6, 7], "turn", 3)
    assert (second.token_ids, second.text, second.num_tokens) == ([], "", 2)
    assert stream.offsets == (SampleOffset(token_ids=3, text_chars=6), OFFSETS[1])
    assert stream.finished is not None and stream.summary is not None


@either
def test_a_stream_without_offsets_begins_at_its_start(service: FakeService, connect: Connect) -> None:
    service.resumption = fake_service.one_completion
    deltas, _ = read(service, connect)
    assert [delta.token_offset for delta in deltas] == [0, 1]
    assert list(service.resumed[0].offsets) == []


@either
def test_tokens_that_are_missing_after_the_offset_are_an_error(service: FakeService, connect: Connect) -> None:
    service.resumption = rest
    with pytest.raises(TandemError, match="a delta starts at token 1; expected 0"):
        read(service, connect)


@either
@pytest.mark.parametrize(
    ("code", "details", "kind", "keyword"),
    [
        (grpc.StatusCode.NOT_FOUND, [], NotFound, None),
        (grpc.StatusCode.ABORTED, [], Replaced, None),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            [fake_service.bad_request("offsets[0].token_ids", "is 9; the limit is 3")],
            InvalidArgument,
            "offsets[0].token_ids",
        ),
        (grpc.StatusCode.UNAVAILABLE, [error_details_pb2.RequestInfo(request_id="mine")], Unavailable, None),
    ],
)
def test_a_refusal_has_the_class_that_generate_raises(
    service: FakeService,
    connect: Connect,
    code: grpc.StatusCode,
    details: list[Any],
    kind: type[TandemError],
    keyword: str | None,
) -> None:
    service.resumption = fake_service.refusing(code, "offsets[0].token_ids is 9", *details)
    with pytest.raises(kind) as caught:
        read(service, connect, linger_seconds=30.0)
    assert caught.value.keyword == keyword
    # The request may still have a rightful reader.
    assert len(service.resumed) == 1 and service.aborted == []


@either
def test_a_resumed_stream_that_is_lost_continues_if_asked(service: FakeService, connect: Connect) -> None:
    def lost_twice(request: pb.ResumeRequest, ending: Ending) -> Iterator[pb.GenerateResponse]:
        if len(service.resumed) % 3 == 1:
            breaks(ending)
        yield accepted(request.request_id, 2)
        if len(service.resumed) % 3 == 2:
            yield fake_service.delta(1, [6], "tu")
            breaks(ending)
        yield fake_service.delta(2, [7], "rn")
        yield from list(rest(request, ending))[2:]

    service.resumption = lost_twice
    deltas, _ = read(service, connect, offsets=OFFSETS, linger_seconds=30.0)
    assert "".join(delta.text for delta in deltas) == "turn"
    assert [request.offsets[0].token_ids for request in service.resumed] == [1, 1, 2]
    assert service.requests == [] and service.aborted == []
    with pytest.raises(Unavailable, match="Socket closed"):
        read(service, connect, offsets=OFFSETS)


def test_leaving_a_resumed_stream_aborts_its_request(service: FakeService) -> None:
    async def leave_async() -> None:
        async with AsyncClient(service.address) as client:
            async for _ in client.resume("third", SECRET):
                break

    service.resumption = fake_service.endless
    with Client(service.address) as client:
        for _ in client.resume("first", SECRET):
            break
        stream = client.resume("second", SECRET)
        next(stream)
        del stream
        gc.collect()
    asyncio.run(leave_async())
    assert service.aborted == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (("r", "text"), {}, TypeError, "secret is 'text'"),
        ((7, SECRET), {}, TypeError, "request_id is 7"),
        (("r", SECRET), {"offsets": [SampleOffset(token_ids=-1)]}, ValueError, r"offsets\[0\].token_ids is -1"),
        (("r", SECRET), {"offsets": [(1, 2)]}, TypeError, r"offsets\[0\] is \(1, 2\); a SampleOffset is needed"),
    ],
)
def test_a_wrong_argument_is_named(
    client: Client, arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        client.resume(*arguments, **options)
