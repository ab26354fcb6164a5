"""Generate over a real channel, with a fake core that each test controls."""

import asyncio
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.rpc.status import Refusal, seconds_left
from scheduler_svc.frontend.streaming.stream import BYTES_PER_TOKEN, MAX_DELTA_BYTES, StreamLimits
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import WAIT_SECONDS, Service, model_state, rest, served, step_output
from tests.scheduler_svc.frontend.tokenizers_for_tests import spell

# A model with room for outputs larger than any flow-control window.
ROOMY = {"state": model_state(max_length=1 << 21, default_max_new_tokens=1 << 21)}


async def test_a_stream_has_accepted_deltas_finished_and_summary(s: Service) -> None:
    call = s.generate(request_id="r", text="the", stop=pb.StopParams(max_new_tokens=5))
    submit = await s.core.admit(requests_ahead=3)
    # gRPC rounds a deadline up to about three digits.
    assert WAIT_SECONDS / 2 < submit.deadline_seconds < 1.05 * WAIT_SECONDS
    accepted = (await call.read()).accepted
    assert dict(await call.initial_metadata())["x-request-id"] == "r"
    assert accepted == pb.Accepted(
        request_id="r",
        # It asks for no lists of tokens, which Accepted leaves out.
        sampling=pb.SamplingParams.FromString(submit.sampling),
        prompt_tokens=1,
        max_new_tokens=5,
        requests_ahead=3,
    )
    await s.core.output(submit.stream, spell(b"ab"))
    assert (await call.read()).delta == pb.Delta(token_offset=0, token_ids=spell(b"ab"), text="ab")
    await s.core.output(submit.stream, [0xC3])
    assert (await call.read()).delta == pb.Delta(token_offset=2, token_ids=[0xC3], text="")
    await s.core.output(submit.stream, [0xA9, ord("c")], "LENGTH")
    usage = pb.Usage(prompt_tokens=1, output_tokens=5, discarded_tokens=1)
    assert await rest(call) == [
        ("delta", pb.Delta(token_offset=3, token_ids=[0xA9, ord("c")], text="éc")),
        ("finished", pb.Finished(reason=pb.FINISH_REASON_LENGTH, output_tokens=5)),
        ("summary", pb.Summary(usage=usage, timing=pb.Timing(total_seconds=2.0))),
    ]
    assert await call.code() is Code.OK
    assert await s.core.is_silent(), "a request that ended is not cancelled"


async def test_a_stream_ends_at_the_maximum_length_of_the_model(s: Service) -> None:
    ids = pb.TokenIds(ids=[1] * 510)
    call = s.generate(token_ids=ids, stop=pb.StopParams(max_new_tokens=100_000))
    submit = await s.core.admit()
    assert submit.max_new_tokens == 512
    # Two new tokens fit.
    assert (await call.read()).accepted.max_new_tokens == 2
    usage = pb.Usage(prompt_tokens=510, output_tokens=2, cached_prompt_tokens=496)
    await s.core.output(submit.stream, spell(b"ab"), "CONTEXT_FULL", usage=usage)
    _, finished, summary = await rest(call)
    assert finished[1] == pb.Finished(reason=pb.FINISH_REASON_CONTEXT_FULL, output_tokens=2)
    assert summary[1].usage == usage


async def test_a_stream_contains_only_the_requested_fields(s: Service) -> None:
    call, submit = await s.start_stream(output=pb.OutputParams(want_text=False))
    await s.core.output(submit.stream, spell(b"ab"), "LENGTH")
    assert (await rest(call))[0][1] == pb.Delta(token_ids=spell(b"ab"))

    call, submit = await s.start_stream(output=pb.OutputParams(want_token_ids=False))
    await s.core.output(submit.stream, [ord("a"), 0xC3])
    assert (await call.read()).delta == pb.Delta(text="a")
    await s.core.output(submit.stream, [0xA9, 0xE2])
    assert (await call.read()).delta == pb.Delta(token_offset=2, text="é")
    # Empty deltas are not sent.
    await s.core.output(submit.stream, [0x82])
    await s.core.output(submit.stream, [0xAC])
    assert (await call.read()).delta == pb.Delta(token_offset=4, text="€")
    await s.core.output(submit.stream, [], "ABORTED")
    assert [kind for kind, _ in await rest(call)] == ["finished", "summary"]


@pytest.mark.parametrize("reason", ["EOS", "LENGTH", "TIME_LIMIT", "ABORTED"])
async def test_a_stop_string_overrides_an_end_at_a_later_position(s: Service, reason: str) -> None:
    call, submit = await s.start_stream(stop=pb.StopParams(stop_strings=["b"]))
    # The core has already ended the stream, so it gets no Finish.
    await s.core.output(submit.stream, spell(b"abcd"), reason)
    messages = await rest(call)
    assert messages[0][1] == pb.Delta(token_ids=spell(b"ab"), text="a")
    assert messages[1][1].reason == pb.FINISH_REASON_STOP_STRING
    # The core counts 4 tokens and 1 discarded; 2 were delivered.
    assert messages[2][1].usage == pb.Usage(prompt_tokens=1, output_tokens=2, discarded_tokens=3)
    assert await s.core.is_silent()


async def test_tokens_of_steps_in_flight_are_dropped_until_the_core_ends_the_stream(s: Service) -> None:
    call, submit = await s.start_stream(stop=pb.StopParams(stop_strings=["stop"]))
    await s.core.output(submit.stream, spell(b"a stop it"))
    await s.core.expect("finish")
    finished = pb.Finished(reason=pb.FINISH_REASON_STOP_STRING, stop_string="stop", output_tokens=6)
    assert [(await call.read()).WhichOneof("event"), (await call.read()).finished] == ["delta", finished]
    await s.core.output(submit.stream, spell(b"!!"))
    usage = pb.Usage(prompt_tokens=1, output_tokens=6, discarded_tokens=5)
    end = frontend_pb2.End(stream=submit.stream, reason=pb.FINISH_REASON_STOP_STRING, usage=usage)
    await s.core.output_many([], [], [], end)
    assert [(kind, message.usage) for kind, message in await rest(call)] == [("summary", usage)]
    assert await s.core.is_silent()


async def test_an_end_that_crosses_a_finish_confirms_it(s: Service) -> None:
    call, submit = await s.start_stream(stop=pb.StopParams(stop_strings=["b"], include_stop=True))
    await s.core.output(submit.stream, spell(b"abc"))
    await s.core.expect("finish")
    await s.core.output(submit.stream, spell(b"de"), "LENGTH")
    messages = await rest(call)
    assert messages[0][1] == pb.Delta(token_ids=spell(b"ab"), text="ab")
    assert messages[1][1].reason == pb.FINISH_REASON_STOP_STRING
    assert (messages[2][1].usage.output_tokens, messages[2][1].usage.discarded_tokens) == (2, 4)


REJECTED: list[tuple[str, grpc.StatusCode, dict[str, Any]]] = [
    ("INVALID", Code.INVALID_ARGUMENT, {"field": "prompt"}),
    ("DUPLICATE", Code.ALREADY_EXISTS, {}),
    ("QUEUE_FULL", Code.RESOURCE_EXHAUSTED, {"retry": 0.5}),
    ("NOT_READY", Code.UNAVAILABLE, {"retry": 1.0}),
]


async def test_rejections_have_the_matching_status(s: Service) -> None:
    for name, code, told in REJECTED:
        call = s.generate(sampling=pb.SamplingParams(num_samples=3))
        await s.core.refuse(name, "5 of 4", field="prompt")
        await fails(call, code, "5 of 4", **told)
    assert await s.core.is_silent(), "a request that was not admitted is not cancelled"
    assert s.front_end._streams._samples == {}


FAILED = [
    ("INTERNAL", Code.INTERNAL),
    ("DEADLINE", Code.DEADLINE_EXCEEDED),
    ("NO_WORKER", Code.UNAVAILABLE),
    ("SHUTDOWN", Code.UNAVAILABLE),
]


async def test_failures_follow_the_delivered_tokens(s: Service) -> None:
    for name, code in FAILED:
        call, submit = await s.start_stream(request_id=f"r-{name}", stop=pb.StopParams(stop_strings=["bx"]))
        await s.core.output(submit.stream, spell(b"ab"))
        assert (await call.read()).delta.text == "a"
        await s.core.fail(submit.stream, name, "NaN at token 3")
        # The held text comes first.
        assert (await call.read()).delta == pb.Delta(token_offset=2, text="b")
        await fails(call, code, f"request 'r-{name}': NaN at token 3")
    assert await s.core.is_silent()


@pytest.mark.parametrize("phase", ["queued", "decoding", "stopping", "blocked"])
@served(**ROOMY)
async def test_a_caller_that_leaves_in_any_phase_frees_its_request_at_once(s: Service, phase: str) -> None:
    if phase == "blocked":
        call, submit = await block_a_write(s)
    else:
        call, submit = await s.start_stream(stop=pb.StopParams(stop_strings=["a"] if phase == "stopping" else []))
    if phase in ("decoding", "stopping"):
        await s.core.output(submit.stream, spell(b"ab"))
        await (s.core.expect("finish") if phase == "stopping" else call.read())
    assert (await s.leave(call)).stream == submit.stream
    assert s.front_end._streams.num_open == 0
    # Late tokens are dropped.
    await s.core.output(submit.stream, spell(b"cd"), "LENGTH")
    assert await s.core.is_silent()


@pytest.mark.parametrize("remaining", [None, 0.25, 0.0, -1.0])
def test_a_deadline_is_seconds_from_now_or_refused_as_passed(remaining: float | None):
    context = Mock(time_remaining=lambda: remaining)
    if remaining is None or remaining > 0:
        assert seconds_left(context) == (remaining or 0.0)
        return
    with pytest.raises(Refusal) as caught:
        seconds_left(context)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


async def test_malformed_messages_are_invalid_arguments(s: Service) -> None:
    for method, code in (
        *((name, Code.INVALID_ARGUMENT) for name in ("Tokenize", "Detokenize", "Generate")),
        ("Nothing", Code.UNIMPLEMENTED),
    ):
        call = s.channel.unary_stream(f"/tandem.v1.InferenceService/{method}")
        await fails(call(b"\xff\xff\xff"), code)


@served(max_message_bytes=65_536)
async def test_a_message_above_the_limit_is_refused(s: Service) -> None:
    await fails(s.generate(text="x" * 70_000), Code.RESOURCE_EXHAUSTED)
    assert await s.core.is_silent()


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_token_at_a_wrong_offset_fails_only_its_stream(s: Service, num_before: int) -> None:
    call, submit = await s.start_stream()
    other, other_submit = await s.start_stream()
    await s.core.output(submit.stream, [67] * num_before)
    # A token is missing, or one comes again.
    wrong = 1 - num_before
    await s.core.output_many([submit.stream, other_submit.stream], [wrong, 0], [65, 66])
    assert f"token {wrong} came instead of token {num_before}" in await fails(call, Code.INTERNAL)
    assert (await s.core.expect("cancel")).stream == submit.stream
    assert (await other.read()).delta.text == "B"


async def test_malformed_frames_of_the_core_are_dropped(s: Service) -> None:
    call, submit = await s.start_stream()
    await s.core.send_raw(b"")
    await s.core.send_raw(b"\xff\xff\xff")
    await s.core.send(step_output=frontend_pb2.StepOutput(streams=b"12345678", tokens=b"123", offsets=b""))
    await s.ends(call, submit.stream)


async def block_a_write(s: Service) -> tuple[Any, frontend_pb2.Submit]:
    """A stream with a caller that has stopped reading, a blocked write and pending tokens."""
    call, submit = await s.start_stream()
    sample = s.front_end._streams._samples[submit.stream]
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            await s.core.output(submit.stream, [65] * 20_000)
            while sample.num_received < s.core.num_sent[submit.stream]:
                await asyncio.sleep(0)
            # Only a blocked write outlasts the answers of other calls.
            begun = sample.stream.blocked_since
            for _ in range(10):
                await s.model_info()
            if sample.pending and begun and begun == sample.stream.blocked_since:
                return call, submit


@served(**ROOMY)
async def test_a_reader_that_pauses_gets_every_token_once(s: Service) -> None:
    call, submit = await block_a_write(s)
    for _ in range(50):
        await s.core.output(submit.stream, [66])
    await s.core.output(submit.stream, [67], "LENGTH")
    messages = await rest(call)
    tokens: list[int] = []
    for kind, delta in messages[:-2]:
        assert (kind, delta.token_offset) == ("delta", len(tokens))
        assert delta.text.encode() == bytes(delta.token_ids)
        tokens.extend(delta.token_ids)
    num_sent = s.core.num_sent[submit.stream]
    assert tokens == [65] * (num_sent - 51) + [66] * 50 + [67]
    # Tokens that came while the write was blocked leave together, in messages of bounded size.
    assert sum(66 in delta.token_ids for _, delta in messages[:-2]) <= 2
    assert max(len(delta.token_ids) for _, delta in messages[:-2]) == MAX_DELTA_BYTES // BYTES_PER_TOKEN
    assert messages[-2][1].output_tokens == num_sent


@served(**ROOMY)
async def test_a_reader_that_stalls_is_dropped_and_its_request_freed(s: Service) -> None:
    call, submit = await block_a_write(s)
    # Not before the write is blocked for good.
    s.front_end._streams._limits = StreamLimits(stall_seconds=0.1, max_stalled_bytes=1000)
    assert (await s.core.expect("cancel")).stream == submit.stream
    assert "has read nothing for" in await fails(call, Code.RESOURCE_EXHAUSTED)
    assert s.front_end._streams.num_open == 0
    await s.start_stream()


async def test_under_load_tokens_are_merged_but_first_tokens_and_ends_are_not_delayed(s: Service) -> None:
    call, submit = await s.start_stream()
    wakeups = s.front_end._streams._output
    # Every rate counts as busy.
    wakeups._limits = StreamLimits(merge_seconds=30.0, sort_seconds=30.0, busy_tokens_per_second=-1.0)
    wakeups._rate_since = 0.0
    await s.core.output(submit.stream, spell(b"a"))
    assert (await call.read()).delta.text == "a"
    for byte in b"bcd":
        await s.core.output(submit.stream, [byte])
    await s.core.output(submit.stream, spell(b"e"), "LENGTH")
    messages = await rest(call)
    assert messages[0][1] == pb.Delta(token_offset=1, token_ids=spell(b"bcde"), text="bcde")
    assert len(messages) == 3


async def test_messages_of_a_batch_are_handled_in_order(s: Service) -> None:
    call = s.generate()
    submit = await s.core.expect("submit")
    end = frontend_pb2.End(stream=submit.stream, reason=pb.FINISH_REASON_LENGTH)
    messages = [
        frontend_pb2.CoreToFrontend(admitted=frontend_pb2.Admitted(stream=submit.stream)),
        frontend_pb2.CoreToFrontend(step_output=step_output([submit.stream], [0], spell(b"a"))),
        frontend_pb2.CoreToFrontend(step_output=step_output([submit.stream], [1], spell(b"b"), ends=[end])),
    ]
    await s.core.send(batch=frontend_pb2.Batch(messages=messages))
    kinds = await rest(call)
    assert [kind for kind, _ in kinds] == ["accepted", "delta", "finished", "summary"]
    assert kinds[1][1] == pb.Delta(token_ids=b"ab", text="ab")
