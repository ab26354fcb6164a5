"""The streams of both clients: their deltas, and that leaving a stream ends its call at the server."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable

import pytest
from tandem.v1 import inference_pb2 as pb

from tandem_client import AsyncClient, Client
from tandem_client.async_client import AsyncGenerateStream
from tandem_client.errors import DeadlineExceeded, ProtocolError
from tandem_client.sync_client import GenerateStream
from tandem_client.types import Delta, FinishReason, PromptInfo, TokenLogprob, Waiting, WaitReason
from tests.client import fake_service as fake
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService

WHOLE = [
    Delta(token_offset=0, token_ids=(5,), text="Ré"),
    Delta(token_offset=1, token_ids=(6, 7), text="turn"),
]


@either
def test_a_stream_yields_deltas_and_then_has_its_summary(service: FakeService, connect: Connect) -> None:
    with connect(service.address) as client:
        stream = client.generate("hi", request_id="mine")
        assert [next(stream), *stream] == WHOLE
        with pytest.raises(StopIteration):
            next(stream)
    assert (stream.accepted.request_id, stream.accepted.sampling.seed) == ("mine", 2**63)
    assert (stream.finished.reason, stream.finished.stop_string) == (FinishReason.LENGTH, None)
    assert (stream.summary.usage.output_tokens, stream.summary.timing.worker_changes) == (3, 1)
    (sample,) = stream.samples
    assert (sample.text, sample.token_ids, sample.logprobs) == ("Réturn", [5, 6, 7], [])
    assert sample.finished == stream.finished
    assert stream.prompt_info is None


def test_streams_run_side_by_side(service: FakeService, client: Client) -> None:
    meeting = threading.Barrier(4, timeout=fake.WAIT_SECONDS)

    def together(request: pb.GenerateRequest, ending: fake.Ending) -> fake.Messages:
        meeting.wait()
        return fake.one_completion(request, ending)

    service.behaviour = together
    streams = [client.generate([1, 2], request_id=str(i)) for i in range(4)]
    assert [list(stream) for stream in streams] == [WHOLE] * 4


WAITS = [
    Waiting(reason=WaitReason.WORKER_LOST, message="why 1", since=1e9 + 1),
    Waiting(reason=WaitReason.WORKER_LOST, message="why 2", since=1e9 + 2),
]


@either
def test_a_loop_over_deltas_passes_waits_by_and_its_owner_may_hear_them(service: FakeService, connect: Connect) -> None:
    service.behaviour = fake.waits_first
    with connect(service.address) as client:
        assert list(client.generate("hi")) == WHOLE
        stream = client.generate("hi")
        heard = list[Waiting]()
        stream.on_waiting = heard.append
        assert stream.waiting is None
        deltas = list[Delta]()
        for delta in stream:
            deltas.append(delta)
            # Output ends the wait.
            assert stream.waiting is None and len(heard) == len(deltas)
        assert (deltas, heard) == (WHOLE, WAITS)
        kinds = [message.WhichOneof("event") for message in client.generate("hi").messages()]
    assert kinds == ["accepted", "waiting", "delta", "waiting", "delta", "finished", "summary"]


def test_a_timeout_names_what_the_request_was_waiting_for(service: FakeService, client: Client) -> None:
    over = threading.Event()

    def never(request: pb.GenerateRequest, ending: fake.Ending) -> fake.Messages:
        for message in fake.waits_first(request, ending):
            if message.HasField("delta"):
                over.wait(fake.WAIT_SECONDS)
            yield message

    service.behaviour = never
    with pytest.raises(DeadlineExceeded, match=r"the stream did not end within 0.3 s; it was waiting: why 1$"):
        list(client.generate("hi", timeout=0.3))
    over.set()


TWO = {"num_samples": 2, "logprobs": 1, "prompt_logprobs_start": 0}


def with_top(value: float) -> TokenLogprob:
    return TokenLogprob(logprob=value, top=((40, value - 0.25),))


@either
def test_deltas_are_separated_by_sample(service: FakeService, connect: Connect) -> None:
    service.behaviour = fake.two_samples
    with connect(service.address) as client:
        stream = client.generate("hi", **TWO)
        deltas = [next(stream)]
        # The prompt's logprobs are complete before the first delta, and every sample exists.
        assert len(stream.prompt_info.logprobs) == 3
        assert [sample.token_ids for sample in stream.samples] == [[5], []]
        deltas += stream
    assert [(delta.sample_idx, delta.token_offset, delta.token_ids) for delta in deltas] == [
        (0, 0, (5,)),
        (1, 0, (8, 9)),
        (0, 1, (6,)),
    ]
    assert deltas[1].logprobs == (with_top(-1.5), with_top(-2.5))
    assert stream.prompt_info == PromptInfo(start=1, logprobs=(with_top(-1.0), with_top(-2.0), with_top(-3.0)))
    first, second = stream.samples
    assert (first.text, first.token_ids, first.logprobs) == ("Réturn", [5, 6], [with_top(-0.5), with_top(-0.75)])
    assert (second.text, second.token_ids, second.logprobs) == ("en", [8, 9], [with_top(-1.5), with_top(-2.5)])
    assert (first.finished.reason, first.finished.output_tokens) == (FinishReason.LENGTH, 2)
    assert (second.finished.reason, second.finished.sample_idx) == (FinishReason.EOS, 1)
    assert stream.finished == first.finished


def break_out(stream: GenerateStream) -> None:
    for _ in stream:
        break


def drop(stream: GenerateStream) -> None:
    next(stream)


def with_block(stream: GenerateStream) -> None:
    with stream:
        next(stream)


def leave_messages(stream: GenerateStream) -> None:
    for message in stream.messages():
        if message.HasField("delta"):
            break


def close_from_another_thread(stream: GenerateStream) -> None:
    next(stream)
    closer = threading.Timer(0.01, stream.close)
    closer.start()
    # The reader is blocked when the other thread closes the stream. That ends the loop without an error.
    assert list(stream) == []
    closer.join()


@pytest.mark.parametrize("leave", [break_out, drop, with_block, leave_messages, close_from_another_thread])
def test_leaving_a_stream_ends_the_call(
    service: FakeService, client: Client, leave: Callable[[GenerateStream], None]
) -> None:
    service.behaviour = fake.endless
    leave(client.generate("hi"))
    gc.collect()
    assert service.endings[0].wait()


async def async_break(stream: AsyncGenerateStream) -> None:
    async for _ in stream:
        break


async def async_drop(stream: AsyncGenerateStream) -> None:
    await anext(stream)


async def async_with(stream: AsyncGenerateStream) -> None:
    async with stream:
        await anext(stream)


async def async_aclose(stream: AsyncGenerateStream) -> None:
    await anext(stream)
    await stream.aclose()
    assert [delta async for delta in stream] == []


async def async_cancel(stream: AsyncGenerateStream) -> None:
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def async_close_while_read(stream: AsyncGenerateStream) -> None:
    await anext(stream)

    async def rest() -> list[Delta]:
        return [delta async for delta in stream]

    reader = asyncio.create_task(rest())
    await asyncio.sleep(0)
    stream.close()
    assert await reader == []


@pytest.mark.parametrize(
    "leave", [async_break, async_drop, async_with, async_aclose, async_cancel, async_close_while_read]
)
async def test_leaving_an_async_stream_ends_the_call(
    service: FakeService, leave: Callable[[AsyncGenerateStream], Awaitable[None]]
) -> None:
    service.behaviour = fake.endless
    async with AsyncClient(service.address) as client:
        # This frame must not hold a reference, so that the one in `leave` is the last.
        await leave(client.generate("hi"))
        gc.collect()
        # The client is still open, because closing it would end every call anyway.
        assert await asyncio.to_thread(service.endings[0].wait)


def test_a_stream_can_be_closed_after_its_loop_has_ended(service: FakeService) -> None:
    service.behaviour = fake.endless

    async def begin() -> AsyncGenerateStream:
        async with AsyncClient(service.address) as client:
            stream = client.generate("hi")
            await anext(stream)
            return stream

    stream = asyncio.run(begin())
    assert service.endings[0].wait()
    # An exception here could not be caught; pytest makes it an error.
    del stream
    gc.collect()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([fake.delta(0, [5], "R", sample_idx=2)], "a message names sample 2; the request has 2$"),
        (
            [fake.delta(at, [5], "R", sample_idx=at, logprobs=fake.logprobs(-1)) for at in (0, 1)],
            "a delta starts at token 1; expected 0$",
        ),
        ([fake.finished(0), fake.summary(0)], "ended without the Finished of sample 1$"),
        ([fake.delta(0, [5], "R")], "a delta of 1 token has 0 logprobs; expected 1$"),
        ([fake.delta(0, [5], "R", logprobs=fake.logprobs(-1, -2))], "a delta of 1 token has 2 logprobs; expected 1$"),
        (
            [fake.prompt_info(1, pb.Logprobs(logprobs=[-1], top_k=2, top_token_ids=[1]))],
            "1 logprob and 2 alternatives of each need 2 alternatives; the message has 1 token id and 0 logprobs",
        ),
        (
            [fake.prompt_info(start, fake.logprobs(-1, -2)) for start in (1, 4)],
            "logprobs of the prompt start at token 4; expected 3$",
        ),
    ],
)
def test_inconsistent_samples_and_logprobs_raise_protocol_error(
    service: FakeService, client: Client, messages: list[pb.GenerateResponse], said: str
) -> None:
    service.behaviour = fake.sending(*messages)
    with pytest.raises(ProtocolError, match=said):
        list(client.generate("hi", num_samples=2, logprobs=0))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (fake.delta(2, [7], "t"), "token 2; expected 1"),
        (fake.delta(0, [5], "R"), "token 0; expected 1"),
        (fake.finished(1), "Summary"),
    ],
)
@either
def test_an_incomplete_stream_raises_protocol_error(
    service: FakeService, connect: Connect, second: pb.GenerateResponse, message: str
) -> None:
    service.behaviour = fake.sending(fake.delta(0, [5], "R"), second)
    with connect(service.address) as client, pytest.raises(ProtocolError, match=message):
        list(client.generate("hi"))


def test_offsets_continue_if_ids_are_not_requested(service: FakeService, client: Client) -> None:
    service.behaviour = fake.sending(
        fake.delta(0, [], "Re"), fake.delta(4, [], "turn"), fake.finished(6), fake.summary(6)
    )
    assert "".join(each.text for each in client.generate("hi", want_token_ids=False)) == "Return"
