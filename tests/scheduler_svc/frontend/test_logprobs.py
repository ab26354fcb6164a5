"""Logprobs over a real channel: always together with their tokens, and the prompt's logprobs before them."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.streaming.stream import (
    MAX_DELTA_BYTES,
    MAX_PROMPT_INFO_BYTES,
    LogprobQueue,
    PromptQueue,
    RequestStream,
    StreamLimits,
    read_logprobs,
)
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import (
    Service,
    model_state,
    packed_logprobs,
    public_logprobs,
    rest,
    served,
    step_output,
    token_logprobs,
)
from tests.scheduler_svc.frontend.tokenizers_for_tests import EOS, byte_level, spell

TWO_TOP = pb.OutputParams(logprobs=2)


async def test_logprobs_come_with_their_tokens_and_the_requested_alternatives(s: Service) -> None:
    call, submit = await s.start_stream(output=TWO_TOP)
    plain, plain_submit = await s.start_stream(output=pb.OutputParams(logprobs=0))
    none, none_submit = await s.start_stream()
    # One step serves all three. The core sends as many alternatives as the most demanding request wants.
    streams = [none_submit.stream, submit.stream, plain_submit.stream]
    logprobs = token_logprobs([-1.0, -2.0], 5, entries=[1, 2])
    await s.core.output_many(streams, [0, 0, 0], spell(b"abc"), logprobs=logprobs)
    assert (await none.read()).delta == pb.Delta(token_ids=spell(b"a"), text="a")
    assert (await call.read()).delta == pb.Delta(token_ids=spell(b"b"), text="b", logprobs=public_logprobs([-1.0], 2))
    assert (await plain.read()).delta == pb.Delta(token_ids=spell(b"c"), text="c", logprobs=public_logprobs([-2.0], 0))


async def test_logprobs_are_sent_at_once_even_if_ids_are_not_wanted(s: Service) -> None:
    output = pb.OutputParams(logprobs=1, want_token_ids=False)
    call, submit = await s.start_stream(output=output)
    await s.core.output(submit.stream, [0xC3], logprobs=token_logprobs([-1.0], 1))
    assert (await call.read()).delta == pb.Delta(logprobs=public_logprobs([-1.0], 1))
    await s.core.output(submit.stream, [0xA9], "LENGTH", logprobs=token_logprobs([-2.0], 1))
    assert (await rest(call))[0][1] == pb.Delta(token_offset=1, text="é", logprobs=public_logprobs([-2.0], 1))


async def test_logprobs_of_a_token_that_waits_for_the_next_one_wait_with_it(s: Service) -> None:
    # Whether a token is the stop token is known only when the End or another token has come.
    call, submit = await s.start_stream(output=TWO_TOP, stop=pb.StopParams(stop_token_ids=[ord(".")]))
    await s.core.output(submit.stream, spell(b"a."), logprobs=token_logprobs([-1.0, -2.0], 2))
    assert (await call.read()).delta == pb.Delta(token_ids=spell(b"a"), text="a", logprobs=public_logprobs([-1.0], 2))
    await s.core.output(submit.stream, spell(b"b."), logprobs=token_logprobs([-3.0, -4.0], 2))
    later = public_logprobs([-2.0, -3.0], 2)
    assert (await call.read()).delta == pb.Delta(token_offset=1, token_ids=spell(b".b"), text=".b", logprobs=later)
    await s.core.output(submit.stream, [], "STOP_TOKEN", stop_token_id=ord("."))
    messages = await rest(call)
    # The stop token's id and logprobs are sent, its text is not.
    assert messages[0][1] == pb.Delta(token_offset=3, token_ids=spell(b"."), logprobs=public_logprobs([-4.0], 2))


async def test_logprobs_of_tokens_after_a_stop_string_are_never_sent(s: Service) -> None:
    call, submit = await s.start_stream(output=TWO_TOP, stop=pb.StopParams(stop_strings=["stop"]))
    values = [-float(i) for i in range(9)]
    await s.core.output(submit.stream, spell(b"a stop it"), logprobs=token_logprobs(values, 2))
    assert (await s.core.expect("finish")).output_tokens == 6
    shown = public_logprobs(values[:6], 2)
    assert (await call.read()).delta == pb.Delta(token_ids=spell(b"a stop"), text="a ", logprobs=shown)
    await s.core.output(submit.stream, spell(b"!"), "STOP_STRING", logprobs=token_logprobs([-9.0], 2))
    assert [kind for kind, _ in await rest(call)] == ["finished", "summary"]


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        token_logprobs([-1.0], 2, entries=[1]),
        token_logprobs([-1.0], 1),
        frontend_pb2.TokenLogprobs(entries=b"\0\0\0\0", **{**packed_logprobs([-1.0], 2), "top_k": 3}),
        frontend_pb2.TokenLogprobs(**packed_logprobs([-1.0], 2)),
    ],
    ids=["no logprobs", "another entry", "too few alternatives", "arrays of different sizes", "no entries"],
)
async def test_a_token_without_logprobs_fails_its_stream(
    s: Service, logprobs: frontend_pb2.TokenLogprobs | None
) -> None:
    call, submit = await s.start_stream(output=TWO_TOP)
    other, other_submit = await s.start_stream()
    await s.core.output_many([submit.stream, other_submit.stream], [0, 0], spell(b"ab"), logprobs=logprobs)
    await fails(call, Code.INTERNAL, "token 0 came without the requested logprobs")
    assert (await s.core.expect("cancel")).stream == submit.stream
    assert (await other.read()).delta.text == "b"


async def test_prompt_logprobs_come_in_order_before_any_delta(s: Service) -> None:
    call, submit = await s.start_stream(
        token_ids=pb.TokenIds(ids=spell(b"abcdef")),
        sampling=pb.SamplingParams(num_samples=2),
        output=pb.OutputParams(logprobs=1, prompt_logprobs_start=2),
    )
    assert (submit.num_logprobs, submit.prompt_logprobs_from) == (2, 2)
    # A token of the other sample came earlier and waits.
    await s.core.output(submit.stream + 1, spell(b"x"), logprobs=token_logprobs([-9.0], 1))
    for start, values, top_k in ((2, [-1.0, -2.0], 3), (4, [-3.0], 1), (5, [-4.0], 1)):
        await s.core.prompt(submit.stream, start, values, top_k)
        assert (await call.read()).prompt_info == pb.PromptInfo(start=start, logprobs=public_logprobs(values, 1))
    waited = public_logprobs([-9.0], 1)
    assert (await call.read()).delta == pb.Delta(sample_idx=1, token_ids=spell(b"x"), text="x", logprobs=waited)


async def test_prompt_logprobs_are_sent_without_logprobs_of_the_output(s: Service) -> None:
    output = pb.OutputParams(prompt_logprobs_start=0)
    call, submit = await s.start_stream(token_ids=pb.TokenIds(ids=spell(b"abc")), output=output)
    assert (submit.num_logprobs, submit.prompt_logprobs_from) == (0, 1)
    # The core may send everything in one message.
    piece = frontend_pb2.PromptLogprobs(stream=submit.stream, start=1, **packed_logprobs([-1.0, -2.0], 0))
    await s.core.send(step_output=step_output([submit.stream], [0], [65], prompt_logprobs=[piece]))
    assert (await call.read()).prompt_info == pb.PromptInfo(start=1, logprobs=public_logprobs([-1.0, -2.0], 0))
    assert (await call.read()).delta == pb.Delta(token_ids=[65], text="A")


async def test_an_end_before_the_last_prompt_logprob_releases_waiting_deltas(s: Service) -> None:
    call, submit = await s.start_stream(
        token_ids=pb.TokenIds(ids=spell(b"abc")),
        sampling=pb.SamplingParams(num_samples=2),
        output=pb.OutputParams(prompt_logprobs_start=0),
    )
    await s.core.prompt(submit.stream, 1, [-1.0])
    await s.core.output(submit.stream + 1, spell(b"x"), "ABORTED")
    await s.core.output(submit.stream, [], "ABORTED")
    kinds = [kind for kind, _ in await rest(call)]
    assert kinds == ["prompt_info", "finished", "delta", "finished", "summary"]


@pytest.mark.parametrize(
    ("start", "count", "top_k"),
    [(3, 1, 1), (1, 1, 1), (2, 5, 1), (2, 1, 0)],
    ids=["gap", "repetition", "beyond the prompt", "too few alternatives"],
)
async def test_unexpected_prompt_logprobs_fail_the_stream(s: Service, start: int, count: int, top_k: int) -> None:
    output = pb.OutputParams(logprobs=1, prompt_logprobs_start=1)
    call, submit = await s.start_stream(token_ids=pb.TokenIds(ids=spell(b"abcdef")), output=output)
    await s.core.prompt(submit.stream, 1, [-1.0], 1)
    assert (await call.read()).prompt_info.start == 1
    await s.core.prompt(submit.stream, start, [-1.0] * count, top_k)
    await fails(call, Code.INTERNAL, f"unexpected logprobs of the prompt came, from token {start} on")
    assert (await s.core.expect("cancel")).stream == submit.stream


async def test_unrequested_prompt_logprobs_fail_the_stream(s: Service) -> None:
    call, submit = await s.start_stream()
    await s.core.prompt(submit.stream, 1, [-1.0], 1)
    await fails(call, Code.INTERNAL)


@served(state=model_state(max_length=1 << 14))
async def test_long_pieces_are_split_into_messages_of_bounded_size(s: Service) -> None:
    num_prompt = 3 * MAX_PROMPT_INFO_BYTES // 44
    values = [-(i % 512) / 2.0 for i in range(num_prompt - 1)]
    output = pb.OutputParams(logprobs=5, prompt_logprobs_start=0)
    call, submit = await s.start_stream(token_ids=pb.TokenIds(ids=[65] * num_prompt), output=output)
    await s.core.prompt(submit.stream, 1, values, 5)
    await s.core.output(submit.stream, [66], "LENGTH", logprobs=token_logprobs([-1.0], 5))
    messages = await rest(call)
    infos = [message for kind, message in messages if kind == "prompt_info"]
    assert len(infos) == len(messages) - 3 == 3
    assert max(info.ByteSize() for info in infos) <= MAX_PROMPT_INFO_BYTES
    assert [info.start for info in infos] == [1 + i * (MAX_PROMPT_INFO_BYTES // 44) for i in range(3)]
    assert [value for info in infos for value in info.logprobs.logprobs] == values


async def test_deltas_with_logprobs_are_of_bounded_size(s: Service) -> None:
    call, submit = await s.start_stream(output=pb.OutputParams(logprobs=5), stop=pb.StopParams(max_new_tokens=400))
    values = [-(i % 512) / 2.0 for i in range(400)]
    await s.core.output(submit.stream, [65] * 400, "LENGTH", logprobs=token_logprobs(values, 5))
    deltas = [message for kind, message in await rest(call) if kind == "delta"]
    assert max(len(delta.token_ids) for delta in deltas) == MAX_DELTA_BYTES // (4 + 4 + 5 * 8)
    assert all(len(delta.logprobs.logprobs) == len(delta.token_ids) for delta in deltas)
    assert [value for delta in deltas for value in delta.logprobs.logprobs] == values


def test_pending_bytes_count_tokens_and_all_logprobs():
    stream = RequestStream(None)
    wanted = {"num_samples": 2, "num_logprobs": 3, "prompt_logprobs_from": 1}
    stream.begin(1, frontend_pb2.Submit(prompt=b"\0" * 40, max_new_tokens=9, **wanted))
    assert stream.prompt is not None and stream.num_bytes == 0
    piece = read_logprobs(frontend_pb2.PromptLogprobs(**packed_logprobs([-1.0] * 3, 2)))
    assert stream.prompt.put(1, piece)
    assert stream.num_bytes == 3 * (4 + 2 * 8)
    first, second = stream.samples
    first.pending.extend([1, 2])
    assert second.logprobs is not None
    assert second.logprobs.put(piece, slice(0, 1))
    assert stream.num_bytes == 3 * 20 + 2 * 4 + 20
    # Logprobs of tokens that were taken but not sent are still pending.
    first.take()
    stream.prompt.take(1)
    assert stream.num_bytes == 2 * 20 + 20


@served(
    state=model_state(max_length=1 << 19),
    max_message_bytes=1 << 21,
    stream_limits=StreamLimits(stall_seconds=0.1, max_stalled_bytes=1000),
)
async def test_a_reader_that_stalls_on_prompt_logprobs_is_dropped(s: Service) -> None:
    num_prompt = 1 << 18
    output = pb.OutputParams(logprobs=5, prompt_logprobs_start=0)
    call, submit = await s.start_stream(token_ids=pb.TokenIds(ids=[65] * num_prompt), output=output)
    sent = 1
    while await s.core.is_silent(0.0) and sent + 20_000 < num_prompt:
        await s.core.prompt(submit.stream, sent, [-1.0] * 20_000, 5)
        sent += 20_000
    assert (await s.core.expect("cancel")).stream == submit.stream
    assert "has read nothing for" in await fails(call, Code.RESOURCE_EXHAUSTED)


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12))
def test_a_queue_returns_logprobs_in_order(num_top: int, turns: list[tuple[int, int]]):
    queue, came, gone = LogprobQueue(num_top), 0, 0
    for num_put, num_take in turns:
        values = [-float(i) for i in range(came, came + num_put)]
        assert queue.put(read_logprobs(frontend_pb2.PromptLogprobs(**packed_logprobs(values, 3))), slice(None))
        came += num_put
        taken = min(num_take, came - gone)
        assert queue.take(num_take) == public_logprobs([-float(i) for i in range(gone, gone + taken)], num_top)
        gone += taken
        assert len(queue) == came - gone


def test_a_prompt_queue_is_complete_when_all_logprobs_have_come():
    queue = PromptQueue(start=3, end=5, num_top=0)
    assert not queue.is_complete and queue.take(1000) is None
    for at in (3, 4):
        assert not queue.is_complete
        assert queue.put(at, read_logprobs(frontend_pb2.PromptLogprobs(**packed_logprobs([-float(at)], 0))))
    for at in (3, 4):
        assert queue.is_complete
        assert queue.take(1) == pb.PromptInfo(start=at, logprobs=public_logprobs([-float(at)], 0))


WITH_PIECES = pb.OutputParams(logprobs=2, logprob_pieces=True)


def pieces_of(found: Iterable[pb.TokenPiece]) -> list[tuple[str, bytes]]:
    return [(piece.text, piece.data) for piece in found]


async def test_pieces_are_those_of_the_text_although_a_stop_string_holds_it_back(s: Service) -> None:
    call, submit = await s.start_stream(output=WITH_PIECES, stop=pb.StopParams(stop_strings=["é!"]))
    deltas = list[pb.Delta]()
    for i, chars in enumerate((b"a", "é".encode())):
        for char in chars:
            await s.core.output(submit.stream, [char], logprobs=token_logprobs([-1.0 - i], 2))
        deltas.append((await call.read()).delta)
    assert [delta.text for delta in deltas] == ["a", ""]
    pieces = [pieces_of(delta.logprobs.pieces) for delta in deltas]
    assert pieces == [[("a", b"a")], [("", b"\xc3"), ("é", b"\xa9")]]
    await s.core.output(submit.stream, [0xC3], "LENGTH", logprobs=token_logprobs([-9.0], 2))
    [(_, last), *_] = await rest(call)
    # The text ends inside a character.
    assert (last.text, pieces_of(last.logprobs.pieces)) == ("é\ufffd", [("\ufffd", b"\xc3")])
    for delta in [*deltas, last]:
        ids = list(delta.logprobs.top_token_ids)
        assert len(ids) == 2 * len(delta.logprobs.pieces)
        assert [piece.data for piece in delta.logprobs.top_pieces] == [bytes([token_id]) for token_id in ids]
    first = deltas[0].logprobs
    assert pieces_of(first.top_pieces) == [(chr(i), bytes([i])) for i in first.top_token_ids]


@pytest.mark.parametrize("text", [b"ab", b"a\xe2", b"a\xe2\x82", "a€".encode(), "€".encode() + b"\xf0\x9f\x98"])
@pytest.mark.parametrize("ends", ["with its last token", "with a stop token", "later"])
async def test_pieces_are_the_whole_text_however_it_ends(s: Service, text: bytes, ends: str) -> None:
    """A character that stays incomplete is U+FFFD in the text and in the piece of its last token."""
    eos = byte_level().token_to_id(EOS) or 0
    call, submit = await s.start_stream(output=pb.OutputParams(logprobs=0, logprob_pieces=True))
    other, other_submit = await s.start_stream()
    for i, char in enumerate(text):
        reason = "LENGTH" if ends == "with its last token" and i == len(text) - 1 else ""
        await s.core.output(submit.stream, [char], reason, logprobs=token_logprobs([-1.0], 0))
        # Once the caller of another stream has what came later, the token has been sent, or waits for the next.
        await s.core.output(other_submit.stream, [ord("x")])
        await other.read()
    if ends == "with a stop token":
        await s.core.output(submit.stream, [eos], logprobs=token_logprobs([-1.0], 0))
        await s.core.output(submit.stream, [], "EOS", stop_token_id=eos)
    elif ends == "later":
        await s.core.output(submit.stream, [], "LENGTH")
    deltas = [message for kind, message in await rest(call) if kind == "delta"]
    whole = "".join(delta.text for delta in deltas)
    pieces = [piece for delta in deltas for piece in delta.logprobs.pieces]
    assert [i for delta in deltas for i in delta.token_ids][: len(text)] == list(text)
    assert whole == byte_level().decode(list(text))
    assert len(pieces) == len(text) + (ends == "with a stop token")
    assert "".join(piece.text for piece in pieces if piece.text != EOS) == whole
    assert b"".join(piece.data for piece in pieces) == text


async def test_the_name_of_a_special_token_is_no_text(s: Service) -> None:
    eos = byte_level().token_to_id(EOS) or 0
    for skip in (True, False):
        output = pb.OutputParams(logprobs=0, logprob_pieces=True, skip_special_tokens=skip)
        call, submit = await s.start_stream(output=output, stop=pb.StopParams(ignore_eos=True))
        await s.core.output(submit.stream, [eos, ord("a")], "LENGTH", logprobs=token_logprobs([-1.0, -2.0], 0))
        [(_, delta), *_] = await rest(call)
        assert delta.text == ("a" if skip else f"{EOS}a")
        assert pieces_of(delta.logprobs.pieces) == [(EOS, b"" if skip else EOS.encode()), ("a", b"a")]


@pytest.mark.parametrize("start", [0, 2])
async def test_the_pieces_of_a_prompt(s: Service, start: int) -> None:
    output = pb.OutputParams(logprobs=1, prompt_logprobs_start=start, logprob_pieces=True)
    call, submit = await s.start_stream(text="aé€", output=output)
    ids = byte_level().encode("aé€").ids
    assert len(ids) == 3
    first = max(1, start)
    values = [-float(i) for i in range(first, 3)]
    await s.core.prompt(submit.stream, first, values, 1)
    info = (await call.read()).prompt_info
    assert info.HasField("first") == (start == 0)
    assert not start or pieces_of([info.first]) == [("", b"")]
    assert pieces_of(info.logprobs.pieces) == [(char, char.encode()) for char in "aé€"[first:]]
    assert len(info.logprobs.top_pieces) == len(values)
