"""Several samples of one request over a real channel: separate outputs and ends, common failure and release."""

import asyncio
from typing import Any

import grpc
import pytest
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.streaming import sender
from scheduler_svc.frontend.streaming.sender import summarize
from scheduler_svc.frontend.streaming.stream import StreamLimits
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, rest, served
from tests.scheduler_svc.frontend.tokenizers_for_tests import EOS, byte_level, spell

EOS_ID = byte_level().token_to_id(EOS)
TWO, THREE = pb.SamplingParams(num_samples=2), pb.SamplingParams(num_samples=3)


async def cancels(s: Service, count: int) -> list[int]:
    """The samples that the front end cancels, in order: after any end those that the core still runs, and no other."""
    streams = [(await s.core.expect("cancel")).stream for _ in range(count)]
    assert await s.core.is_silent()
    return streams


def of_sample(messages: list[Any], idx: int) -> tuple[str, list[int], pb.Finished | None]:
    """A sample's text, its token ids, and how it ended. Its deltas must be consecutive."""
    text, tokens, finished = "", list[int](), None
    for kind, message in messages:
        if kind in ("delta", "finished") and message.sample_idx == idx:
            assert finished is None, "something after Finished"
            if kind == "finished":
                finished = message
                continue
            assert message.token_offset == len(tokens)
            text += message.text
            tokens.extend(message.token_ids)
    return text, tokens, finished


async def test_samples_have_consecutive_stream_numbers(s: Service) -> None:
    first, submit = await s.start_stream(sampling=THREE)
    other, other_submit = await s.start_stream()
    assert (submit.stream, submit.num_samples, other_submit.stream) == (1, 3, 4)
    # The core sends all four tokens in one step.
    await s.core.output_many([3, 1, 2, 4], [0, 0, 0, 0], spell(b"cabx"))
    for idx, text in enumerate("abc"):
        assert (await first.read()).delta == pb.Delta(sample_idx=idx, token_ids=spell(text.encode()), text=text)
    assert (await other.read()).delta == pb.Delta(token_ids=spell(b"x"), text="x")


async def test_each_sample_has_its_own_end_and_the_summary_covers_all(s: Service) -> None:
    call, submit = await s.start_stream(sampling=THREE, output=pb.OutputParams(skip_special_tokens=False))
    first = submit.stream
    await s.core.output(first + 1, [ord("b"), EOS_ID], "EOS", stop_token_id=EOS_ID)
    messages = [("delta", (await call.read()).delta), ("finished", (await call.read()).finished)]
    # The stop token is an id without text.
    assert messages[0][1] == pb.Delta(sample_idx=1, token_ids=[ord("b"), EOS_ID], text="b")
    ended = {"stop_token_id": EOS_ID, "output_tokens": 2, "sample_idx": 1}
    assert messages[1][1] == pb.Finished(reason=pb.FINISH_REASON_EOS, **ended)
    await s.core.output(first, [0xC3])
    await s.core.output(first + 2, [0xC3])
    await s.core.output(first, [0xA9], "LENGTH")
    await s.core.output(first + 2, [0xA8], "ABORTED")
    messages += await rest(call)
    assert of_sample(messages, 0)[:2] == ("é", [0xC3, 0xA9])
    assert of_sample(messages, 2)[:2] == ("è", [0xC3, 0xA8])
    assert [of_sample(messages, idx)[2].reason for idx in range(3)] == [
        pb.FINISH_REASON_LENGTH,
        pb.FINISH_REASON_EOS,
        pb.FINISH_REASON_ABORTED,
    ]
    assert [kind for kind, _ in messages].count("summary") == 1
    # The fake core reports 1 discarded token of each sample.
    assert messages[-1][1].usage == pb.Usage(prompt_tokens=1, output_tokens=6, discarded_tokens=3)
    assert await call.code() is Code.OK
    assert await s.core.is_silent()


async def test_a_stop_string_ends_only_its_own_sample(s: Service) -> None:
    call, submit = await s.start_stream(sampling=TWO, stop=pb.StopParams(stop_strings=["stop"]))
    first = submit.stream
    # Both samples contain half of the string; only one completes it.
    await s.core.output(first, spell(b"a st"))
    await s.core.output(first + 1, spell(b"b st"))
    for idx, text in enumerate(("a ", "b ")):
        token_ids = spell(f"{text}st".encode())
        assert (await call.read()).delta == pb.Delta(sample_idx=idx, token_ids=token_ids, text=text)
    await s.core.output(first + 1, spell(b"op it"))
    assert await s.core.expect("finish") == frontend_pb2.Finish(stream=first + 1, output_tokens=6)
    assert (await call.read()).delta == pb.Delta(sample_idx=1, token_offset=4, token_ids=spell(b"op"))
    assert (await call.read()).finished == pb.Finished(
        reason=pb.FINISH_REASON_STOP_STRING, stop_string="stop", output_tokens=6, sample_idx=1
    )
    await s.core.output(first + 1, spell(b"!!"), "STOP_STRING")
    await s.core.output(first, spell(b"ay"), "LENGTH")
    messages = await rest(call)
    assert [kind for kind, _ in messages] == ["delta", "finished", "summary"]
    assert messages[0][1] == pb.Delta(token_offset=4, token_ids=spell(b"ay"), text="stay")
    # 6 tokens of each were delivered. One sample had 5 more, and the core reports 1 discarded of each.
    assert messages[2][1].usage == pb.Usage(prompt_tokens=1, output_tokens=12, discarded_tokens=7)
    assert await s.core.is_silent()


@served((sender, "ANSWER_SECONDS", 0.05))
async def test_a_stop_that_the_core_never_confirms_fails_after_the_others_end(s: Service) -> None:
    call, submit = await s.start_stream(sampling=TWO, stop=pb.StopParams(stop_strings=["a"]))
    await s.core.output(submit.stream, spell(b"a"))
    await s.core.expect("finish")
    await s.core.output(submit.stream + 1, spell(b"b"), "LENGTH")
    await fails(call, Code.UNAVAILABLE, "the scheduler's core has not answered for 0.05 s")
    assert await cancels(s, 1) == [submit.stream]


async def test_a_failed_sample_ends_the_others_after_their_received_tokens(s: Service) -> None:
    call, submit = await s.start_stream(request_id="r", sampling=THREE, stop=pb.StopParams(stop_strings=["bx", "cx"]))
    first = submit.stream
    await s.core.output(first, spell(b"a"), "LENGTH")
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["delta", "finished"]
    why = frontend_pb2.Failure(code=frontend_pb2.FAILURE_CODE_INTERNAL, message="NaN at token 1")
    failed = frontend_pb2.End(stream=first + 1, failure=why)
    await s.core.output_many([first + 1, first + 2], [0, 0], spell(b"bc"), failed)
    assert await cancels(s, 1) == [first + 2]
    # Tokens that were in flight are dropped.
    await s.core.output_many([first + 2], [1], spell(b"!"))
    messages: list[Any] = []
    with pytest.raises(grpc.aio.AioRpcError):
        await rest(call, messages)
    assert (await call.code(), await call.details()) == (Code.INTERNAL, "request 'r': NaN at token 1")
    # The held text is delivered too. Samples that did not end have no Finished.
    assert of_sample(messages, 1) == ("b", spell(b"b"), None)
    assert of_sample(messages, 2) == ("c", spell(b"c"), None)


async def test_a_token_at_a_wrong_offset_frees_all_samples(s: Service) -> None:
    call, submit = await s.start_stream(sampling=THREE)
    await s.core.output_many([submit.stream + 1], [1], [65])
    assert "token 1 came instead of token 0" in await fails(call, Code.INTERNAL)
    assert await cancels(s, 3) == [submit.stream, submit.stream + 1, submit.stream + 2]
    assert s.front_end._streams._samples == {}


async def test_cancel_frees_the_samples_that_run(s: Service) -> None:
    call, submit = await s.start_stream(sampling=THREE)
    await s.core.output(submit.stream + 1, spell(b"a"), "LENGTH")
    for _ in range(2):
        await call.read()
    call.cancel()
    assert await cancels(s, 2) == [submit.stream, submit.stream + 2]
    assert (s.front_end._streams.num_open, s.front_end._streams._samples) == (0, {})


async def test_cancel_before_admission_and_the_callers_deadline_free_every_sample(s: Service) -> None:
    call = s.generate(sampling=THREE)
    submit = await s.core.expect("submit")
    call.cancel()
    assert await cancels(s, 3) == [submit.stream + idx for idx in range(3)]
    call = s.generate(sampling=THREE, timeout=1.0)
    submit = await s.core.admit()
    await fails(call, Code.DEADLINE_EXCEEDED)
    assert await cancels(s, 3) == [submit.stream + idx for idx in range(3)]


@served(grace_seconds=0.05)
async def test_the_end_of_the_grace_period_frees_the_samples_that_run(s: Service) -> None:
    call, submit = await s.start_stream(sampling=THREE)
    await s.core.output(submit.stream, spell(b"a"), "LENGTH")
    s.front_end.stop()
    assert "grace period of 0.05 s" in await fails(call, Code.UNAVAILABLE)
    assert [(await s.core.expect("cancel")).stream for _ in range(2)] == [submit.stream + 1, submit.stream + 2]


@served(stream_limits=StreamLimits(max_streams=4))
async def test_each_sample_counts_against_max_streams(s: Service) -> None:
    call, _ = await s.start_stream(sampling=THREE)
    full = "4 samples of requests are open; the limit is 4"
    await fails(s.generate(sampling=TWO), Code.RESOURCE_EXHAUSTED, full, retry=0.5)
    assert await s.core.is_silent()
    await s.start_stream()
    call.cancel()
    await cancels(s, 3)
    await s.start_stream(sampling=THREE)


async def test_a_sample_with_many_tokens_does_not_block_the_others(s: Service) -> None:
    call, submit = await s.start_stream(sampling=TWO, stop=pb.StopParams(max_new_tokens=500))
    first = submit.stream
    # The first sample gets more tokens than fit into a message before the second gets one. None is lost.
    for _ in range(4):
        await s.core.output(first, [65] * 125)
        await s.core.output(first + 1, [66])
    await s.core.output(first + 1, [], "ABORTED")
    await s.core.output(first, [], "LENGTH")
    messages = await rest(call)
    assert of_sample(messages, 0)[:2] == ("A" * 500, [65] * 500)
    assert of_sample(messages, 1)[:2] == ("B" * 4, [66] * 4)


@served(stream_limits=StreamLimits(stall_seconds=0.5, max_stalled_bytes=100, max_pending_bytes=1000))
async def test_pending_bytes_of_all_samples_count_against_the_stall_limit(s: Service) -> None:
    _, submit = await s.start_stream(sampling=THREE)
    streams = s.front_end._streams
    stream = streams._samples[submit.stream].stream
    # The stream looks as if a write is blocked. Each sample has 28 bytes pending, below the limit.
    stream.blocked_since = asyncio.get_running_loop().time() - 1.0
    for sample in stream.samples:
        sample.pending.extend([65] * 7)
    streams.drop_stalled()
    assert stream.failure is None
    stream.samples[2].pending.extend([65] * 5)
    streams.drop_stalled()
    assert stream.failure is not None
    assert "the reader has read nothing for 1 s and 104 bytes are pending" in stream.failure.message
    assert "the limits are 0.5 s with 100 bytes, 300 s, and 1000 bytes" in stream.failure.message
    assert await cancels(s, 3) == [submit.stream + idx for idx in range(3)]


@served(stream_limits=StreamLimits(max_pending_bytes=100))
async def test_max_pending_bytes_drops_a_reader_at_once(s: Service) -> None:
    _, submit = await s.start_stream()
    streams = s.front_end._streams
    stream = streams._samples[submit.stream].stream
    stream.samples[0].pending.extend([65] * 26)
    streams.drop_stalled()
    assert stream.failure is None, "no write is blocked"
    stream.blocked_since = asyncio.get_running_loop().time()
    streams.drop_stalled()
    assert stream.failure is not None


def end(output_tokens: int, first: float, decode: float, *, cached: int = 0, **timing: Any) -> frontend_pb2.End:
    usage = pb.Usage(prompt_tokens=3, discarded_tokens=1, recomputed_tokens=10, cached_prompt_tokens=cached)
    usage.output_tokens = output_tokens
    return frontend_pb2.End(usage=usage, timing=pb.Timing(first_token_seconds=first, decode_seconds=decode, **timing))


def test_the_summary_adds_up_several_samples():
    names = ("queue_seconds", "prefill_seconds", "total_seconds", "preemptions", "worker_changes")
    ends = [
        end(5, 2.0, 4.0, cached=1, **dict(zip(names, (0.5, 1.5, 7.0, 1, 2), strict=True))),
        end(2, 1.0, 1.0, cached=2, **dict(zip(names, (0.25, 0.75, 2.5, 2, 1), strict=True))),
    ]
    usage = {"output_tokens": 5, "discarded_tokens": 4, "recomputed_tokens": 20, "cached_prompt_tokens": 1}
    together = dict(zip(names, (0.25, 0.75, 7.0, 3, 2), strict=True))
    assert summarize(ends, [3, 2], prompt_tokens=3) == pb.Summary(
        usage=pb.Usage(prompt_tokens=3, **usage),
        timing=pb.Timing(first_token_seconds=1.0, decode_seconds=5.0, **together),
    )


def test_a_sample_without_tokens_does_not_count_for_the_first_token_time():
    silent = frontend_pb2.End(timing=pb.Timing(queue_seconds=9.0, total_seconds=9.0))
    summary = summarize([silent, end(1, 2.0, 0.0, total_seconds=2.0)], [0, 1], prompt_tokens=3)
    assert (summary.timing.first_token_seconds, summary.timing.total_seconds) == (2.0, 9.0)
    assert summarize([silent, silent], [0, 0], prompt_tokens=3).timing.queue_seconds == 9.0
