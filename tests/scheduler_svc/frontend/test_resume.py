"""Streams that outlive their connection: secrets, detaching, and streams that are built again from any offset."""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.failures import Code, assert_retry_hint, details, fails, failure
from tests.scheduler_svc.frontend.fake_core import FakeCore, Service, rest, until
from tests.scheduler_svc.frontend.tokenizers_for_tests import EOS, byte_level, spell

LINGER = pb.ResumeParams(linger_seconds=60.0)
EOS_ID = byte_level().token_to_id(EOS)
# Bytes of characters with one to four bytes, and of stop strings that nearly match.
TEXT = "aé€😀 st sto stóp the end".encode()


async def accepted_stream(s: Service, **fields: Any) -> tuple[Any, frontend_pb2.Submit, pb.Accepted]:
    call = s.generate(resume=LINGER, **fields)
    submit = await s.core.admit()
    accepted = (await call.read()).accepted
    stream = s.front_end._streams._samples[submit.stream].stream
    # The write of Accepted may end after the caller has it.
    while not stream.is_resumable:
        await asyncio.sleep(0)
    return call, submit, accepted


async def detached(s: Service, **fields: Any) -> tuple[frontend_pb2.Submit, pb.Accepted]:
    """A stream that its caller has left after Accepted."""
    call, submit, accepted = await accepted_stream(s, **fields)
    assert await s.leave(call) == frontend_pb2.Cancel(stream=submit.stream, detach=True)
    return submit, accepted


def resume(s: Service, accepted: pb.Accepted, *offsets: tuple[int, int], **fields: Any) -> Any:
    request = pb.ResumeRequest(request_id=accepted.request_id, resume_secret=accepted.resume_secret)
    for token_ids, text_chars in offsets:
        request.offsets.add(token_ids=token_ids, text_chars=text_chars)
    request.MergeFrom(pb.ResumeRequest(**fields))
    return s.inference.Resume(request, timeout=TIMEOUT_SECONDS)


async def resumed(core: FakeCore, description: bytes, *samples: tuple[Sequence[int], str]) -> frontend_pb2.Resume:
    """Answers a Resume with the tokens of each sample, and its end if the reason is not empty."""
    asked = await core.expect("resume")
    message = frontend_pb2.Resumed(stream=asked.stream, description=description)
    for idx, (tokens, reason) in enumerate(samples):
        core.num_sent[asked.stream + idx] = len(tokens)
        sample = message.samples.add(tokens=b"".join(token.to_bytes(4, "little") for token in tokens))
        if reason:
            sample.end.CopyFrom(core._end(asked.stream + idx, reason))
    await core.send(resumed=message)
    return asked


async def after_accepted(call: Any) -> list[Any]:
    """All messages behind Accepted."""
    [(kind, _), *messages] = await rest(call)
    assert kind == "accepted"
    return messages


def text_of(messages: Sequence[tuple[str, Any]]) -> str:
    return "".join(message.text for kind, message in messages if kind == "delta")


def ids_of(messages: Sequence[tuple[str, Any]]) -> list[int]:
    return [token for kind, message in messages if kind == "delta" for token in message.token_ids]


async def test_a_request_that_lingers_has_a_secret_of_which_the_core_gets_the_hash(s: Service) -> None:
    _, submit, accepted = await accepted_stream(s)
    assert submit.linger_seconds == 60.0
    assert len(accepted.resume_secret) == 32
    assert submit.secret_hash == hashlib.sha256(accepted.resume_secret).digest()
    assert accepted.resume_secret not in submit.SerializeToString()
    _, _, other = await accepted_stream(s)
    assert other.resume_secret != accepted.resume_secret
    call = s.generate()
    submit = await s.core.admit()
    assert not (submit.linger_seconds or submit.secret_hash or submit.description)
    assert not (await call.read()).accepted.resume_secret


async def test_a_lost_caller_detaches_a_request_that_lingers(s: Service) -> None:
    await detached(s, sampling=pb.SamplingParams(num_samples=3))
    assert await s.core.is_silent()


async def test_a_caller_that_leaves_before_it_has_the_secret_cancels(s: Service) -> None:
    call = s.generate(resume=LINGER)
    submit = await s.core.expect("submit")
    assert await s.leave(call) == frontend_pb2.Cancel(stream=submit.stream)


@pytest.mark.parametrize(
    ("stops", "include_stop"), [((), False), *itertools.product([("stop", "end"), ("the",)], [False, True])]
)
async def test_a_stream_is_equal_wherever_it_breaks(s: Service, stops: tuple[str, ...], include_stop: bool) -> None:
    """The first stream breaks after each number of tokens; the second one gets all tokens with its answer or later."""
    tokens = spell(TEXT)
    stop = pb.StopParams(stop_strings=stops, include_stop=include_stop, max_new_tokens=100)

    async def ended(call: Any, stream: int) -> list[tuple[str, Any]]:
        if stops:
            await s.core.expect("finish")
        await s.core.output(stream, [], "STOP_STRING" if stops else "LENGTH")
        return await rest(call)

    async def broken(num_before: int, num_at_once: int) -> list[tuple[str, Any]]:
        call, submit, accepted = await accepted_stream(s, stop=stop)
        received: list[tuple[str, Any]] = []
        await s.core.output(submit.stream, tokens[:num_before])
        while len(ids_of(received)) < num_before:
            received.append(("delta", (await call.read()).delta))
        assert (await s.leave(call)).detach
        again = resume(s, accepted, (num_before, len(text_of(received))))
        asked = await resumed(s.core, submit.description, (tokens[:num_at_once], ""))
        await s.core.output(asked.stream, tokens[num_at_once:])
        [(_, first), *messages] = await ended(again, asked.stream)
        accepted.requests_ahead = 0
        assert first == accepted
        offset = num_before
        for kind, message in messages:
            if kind == "delta":
                assert message.token_offset == offset
                offset += len(message.token_ids)
        return received + messages

    call, submit = await s.start_stream(stop=stop)
    for token in tokens:
        await s.core.output(submit.stream, [token])
    expected = await ended(call, submit.stream)
    num_kept = len(ids_of(expected))
    assert num_kept == len(tokens) or stops
    # The stop string ends the stream at once, so the first stream breaks before it.
    for num_before in range(num_kept if stops else num_kept + 1):
        # Each third place with none, with a part and with all of the tokens that the first stream has not got.
        num_at_once = num_before + (num_before % 3) * (len(tokens) - num_before) // 2
        got = await broken(num_before, num_at_once)
        assert (ids_of(got), text_of(got)) == (ids_of(expected), text_of(expected)), (num_before, num_at_once)
        assert [message for kind, message in got if kind == "finished"] == [expected[-2][1]]


async def test_a_request_that_has_ended_is_sent_from_the_offset_to_its_summary(s: Service) -> None:
    call, submit, accepted = await accepted_stream(s)
    await s.core.output(submit.stream, spell(b"abc"), "EOS", stop_token_id=EOS_ID)
    await rest(call)
    again = resume(s, accepted, (1, 1))
    await resumed(s.core, submit.description, (spell(b"abc"), "LENGTH"))
    messages = await after_accepted(again)
    assert messages[0] == ("delta", pb.Delta(token_offset=1, token_ids=spell(b"bc"), text="bc"))
    assert [kind for kind, _ in messages] == ["delta", "finished", "summary"]
    again = resume(s, accepted, (3, 3))
    await resumed(s.core, submit.description, (spell(b"abc"), "LENGTH"))
    assert [kind for kind, _ in await after_accepted(again)] == ["finished", "summary"]
    assert await s.core.is_silent()


async def test_samples_are_resumed_with_an_offset_each(s: Service) -> None:
    submit, accepted = await detached(s, sampling=pb.SamplingParams(num_samples=3))
    again = resume(s, accepted, (2, 2), (0, 0))
    asked = await resumed(s.core, submit.description, (spell(b"abc"), ""), (spell(b"xy"), "LENGTH"), ([], ""))
    await s.core.output(asked.stream, spell(b"d"), "LENGTH")
    await s.core.output(asked.stream + 2, spell(b"z"), "LENGTH")
    messages = await after_accepted(again)
    texts: dict[int, str] = {}
    for kind, message in messages:
        if kind == "delta":
            texts[message.sample_idx] = texts.get(message.sample_idx, "") + message.text
    assert texts == {0: "cd", 1: "xy", 2: "z"}
    assert sum(kind == "finished" for kind, _ in messages) == 3


async def test_a_caller_without_ids_gives_its_characters_only(s: Service) -> None:
    submit, accepted = await detached(s, output=pb.OutputParams(want_token_ids=False))
    again = resume(s, accepted, (0, 2))
    await resumed(s.core, submit.description, (spell("aé€".encode()), "LENGTH"))
    messages = await after_accepted(again)
    assert (text_of(messages), ids_of(messages)) == ("€", [])


@pytest.mark.parametrize(
    ("offsets", "field", "parts"),
    [
        ([(4, 0)], "offsets[0].token_ids", ["is 4", "limit is 3"]),
        ([(3, 4)], "offsets[0].text_chars", ["is 4", "limit is 3"]),
        ([(0, 2**32 - 1)], "offsets[0].text_chars", ["is 4294967295", "limit is 3"]),
        ([(0, 0), (0, 0)], "offsets", ["2 long", "limit is 1"]),
    ],
)
async def test_offsets_beyond_the_output_are_refused(
    s: Service, offsets: list[tuple[int, int]], field: str, parts: list[str]
) -> None:
    submit, accepted = await detached(s)
    again = resume(s, accepted, *offsets)
    asked = await resumed(s.core, submit.description, (spell(b"abc"), ""))
    words = await fails(again, Code.INVALID_ARGUMENT, field=field)
    assert all(part in words for part in parts), words
    # The caller may correct itself.
    assert await s.core.expect("cancel") == frontend_pb2.Cancel(stream=asked.stream, detach=True)


async def test_a_resume_request_without_an_id_does_not_reach_the_core(s: Service) -> None:
    await fails(s.inference.Resume(pb.ResumeRequest()), Code.INVALID_ARGUMENT, field="request_id")
    assert await s.core.is_silent()


async def test_an_unknown_request_is_not_found(s: Service) -> None:
    call = s.inference.Resume(pb.ResumeRequest(request_id="r", resume_secret=b"guess"))
    asked = await s.core.expect("resume")
    assert asked.secret_hash == hashlib.sha256(b"guess").digest()
    await s.core.reject(asked.stream, "NOT_FOUND", "no such request")
    await fails(call, Code.NOT_FOUND, "no such request")
    assert await s.core.is_silent()


async def test_the_first_reader_is_told_that_another_one_came(s: Service) -> None:
    call, submit, accepted = await accepted_stream(s)
    await s.core.output(submit.stream, spell(b"a"))
    again = resume(s, accepted)
    asked = await s.core.expect("resume")
    await s.core.send(replaced=frontend_pb2.Replaced(stream=submit.stream))
    message = frontend_pb2.Resumed(stream=asked.stream, description=submit.description)
    message.samples.add(tokens=(ord("a")).to_bytes(4, "little"))
    await s.core.send(resumed=message)
    await fails(call, Code.ABORTED, "another reader resumed this request")
    s.core.num_sent[asked.stream] = 1
    await s.core.output(asked.stream, spell(b"b"), "LENGTH")
    assert text_of(await after_accepted(again)) == "ab"
    assert await s.core.is_silent()


async def test_a_caller_that_leaves_before_the_answer_to_its_resume_detaches_the_request_again(s: Service) -> None:
    _, submit, accepted = await accepted_stream(s)
    again = resume(s, accepted)
    asked = await s.core.expect("resume")
    assert await s.leave(again) == frontend_pb2.Cancel(stream=asked.stream, detach=True)
    await s.core.send(resumed=frontend_pb2.Resumed(stream=asked.stream, description=submit.description))
    assert await s.core.is_silent()


async def test_a_full_queue_and_a_drain_do_not_refuse_a_resume(s: Service) -> None:
    _, submit, accepted = await accepted_stream(s)
    await s.core.send(core_status=frontend_pb2.CoreStatus(queue_full="full"))
    await s.core.send(draining=frontend_pb2.Draining())
    again = resume(s, accepted)
    await resumed(s.core, submit.description, (spell(b"a"), "LENGTH"))
    assert text_of(await after_accepted(again)) == "a"


async def test_a_broken_stream_shows_no_text_that_may_still_change(s: Service) -> None:
    call = s.generate(resume=LINGER, stop=pb.StopParams(stop_strings=["stop"]))
    submit = await s.core.admit()
    stream = s.front_end._streams._samples[submit.stream].stream
    await s.core.output(submit.stream, spell(b"a sto"))
    await until(lambda: stream.is_resumable and stream.samples[0].num_received == 5)
    s.core.close()
    received: list[Any] = []
    with pytest.raises(grpc.aio.AioRpcError, match="core is gone"):
        await rest(call, received)
    # "sto" may become the stop string.
    assert text_of(received) == "a "


async def test_the_failure_of_a_request_says_that_it_has_ended(s: Service) -> None:
    call, submit, _ = await accepted_stream(s)
    await s.core.fail(submit.stream, "NO_WORKER", "no worker")
    error = await failure(call)
    assert error.code() is Code.UNAVAILABLE
    [info] = details(error, error_details_pb2.RequestInfo)
    assert info.request_id == submit.request_id
    assert_retry_hint(error, 1.0)


@pytest.mark.parametrize("broken", [{"description": b"\xff"}, {"samples": [{"tokens": b"\x01\x02\x03"}]}])
async def test_a_malformed_answer_to_a_resume_fails_this_stream_alone(s: Service, broken: dict[str, Any]) -> None:
    _, submit, accepted = await accepted_stream(s)
    again = resume(s, accepted)
    asked = await s.core.expect("resume")
    answer = {"description": submit.description} | broken
    await s.core.send(resumed=frontend_pb2.Resumed(stream=asked.stream, **answer))
    assert "what was kept of its stream is malformed" in await fails(again, Code.INTERNAL)
    assert (await s.core.expect("cancel")).stream == asked.stream
    other = s.generate()
    await s.core.admit()
    assert await other.read()
