"""`Client.resume`: a program continues a stream that another one began. Both clients do the same."""

import gc
import itertools
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
from tests.client.fake_service import SECRET, FakeService, bad_request, breaks, delta, finished, sending, summary

pytestmark = pytest.mark.usefixtures("patient_aborts")

OFFSET = "offsets[0].token_ids"
OFFSETS = (SampleOffset(token_ids=1, text_chars=2), SampleOffset(token_ids=2, text_chars=4))


def read(service: FakeService, connect: Connect, **options: Any) -> tuple[list[Delta], Any]:
    """Returns the deltas of a resumed stream, and the stream."""
    with connect(service.address) as client:
        stream = client.resume("mine", SECRET, **options)
        return list(stream), stream


# The rest of two samples, of which the second was received in full.
ENDS = (finished(2, sample_idx=1), finished(3), summary(5))
rest = sending(delta(1, [6, 7], "turn"), *ENDS)


@either
def test_a_stream_continues_beyond_its_offsets(service: FakeService, connect: Connect) -> None:
    service.resumption = rest
    deltas, stream = read(service, connect, offsets=OFFSETS)
    assert deltas == [Delta(sample_idx=0, token_offset=1, token_ids=(6, 7), text="turn")]
    sent = [pb.SampleOffset(token_ids=1, text_chars=2), pb.SampleOffset(token_ids=2, text_chars=4)]
    assert service.resumed == [pb.ResumeRequest(request_id="mine", resume_secret=SECRET, offsets=sent)]
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
    assert [each.token_offset for each in deltas] == [0, 1]
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
        (grpc.StatusCode.INVALID_ARGUMENT, [bad_request(OFFSET, "is 9")], InvalidArgument, OFFSET),
        (grpc.StatusCode.UNAVAILABLE, [error_details_pb2.RequestInfo(request_id="mine")], Unavailable, None),
    ],
)
def test_a_refusal_has_the_class_that_generate_raises(
    service: FakeService, connect: Connect, code: grpc.StatusCode, details: list[Any], kind: type[TandemError],
    keyword: str | None,
) -> None:  # fmt: skip
    service.resumption = fake_service.refusing(code, f"{OFFSET} is 9", *details)
    with pytest.raises(kind) as caught:
        read(service, connect, linger_seconds=30.0)
    assert caught.value.keyword == keyword
    # The request may still have a rightful reader.
    assert len(service.resumed) == 1 and service.aborted == []


@either
def test_a_resumed_stream_that_is_lost_continues_if_asked(service: FakeService, connect: Connect) -> None:
    lost_twice = itertools.cycle(
        (
            sending(breaks, accepts=False),
            sending(delta(1, [6], "tu"), breaks),
            sending(delta(2, [7], "rn"), *ENDS),
        )
    )
    service.resumption = lambda request, ending: next(lost_twice)(request, ending)
    deltas, _ = read(service, connect, offsets=OFFSETS, linger_seconds=30.0)
    assert "".join(each.text for each in deltas) == "turn"
    assert [request.offsets[0].token_ids for request in service.resumed] == [1, 1, 2]
    assert service.requests == [] and service.aborted == []
    with pytest.raises(Unavailable, match="Socket closed"):
        read(service, connect, offsets=OFFSETS)


async def test_leaving_a_resumed_stream_aborts_its_request(service: FakeService) -> None:
    service.resumption = fake_service.endless
    with Client(service.address) as client:
        for _ in client.resume("first", SECRET):
            break
        next(client.resume("second", SECRET))
        gc.collect()
    async with AsyncClient(service.address) as client:
        async for _ in client.resume("third", SECRET):
            break
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
