"""Cancel, Abort, deadlines and time limits in every phase: the caller gets its answer; pages and rows are freed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import grpc
import pytest
from tandem.v1 import control_pb2

from tests.rigs.processes import Rig
from tests.rigs.streams import Caller, Stream, code_of
from tests.system.asks import Ask, answer

PHASES = ("queued", "prefill", "decode", "preempted")
LONG = Ask(prompt=tuple(b"a long one"), max_new_tokens=180)
# 190 positions at 4 per step.
SLOW_START = Ask(prompt=tuple(b"z" * 190), max_new_tokens=4)


@pytest.fixture(scope="module")
def slow() -> Iterator[Caller]:
    """Steps of 10 ms, two rows, and a pool for one and a half sequences of 200 tokens."""
    with Rig() as rig:
        flags = ("--max-rows", "2", "--num-pages", "76", "--max-length", "200", "--token-budget", "4")
        _, _, caller = rig.serve(*flags, "--step-ms", "10")
        yield caller


class Victim(NamedTuple):
    """A stream in a given phase, with the other streams that run or wait beside it."""

    stream: Stream
    others: list[tuple[Ask, Stream]]


@contextmanager
def brought_to(phase: str, caller: Caller, **settings: float) -> Iterator[Victim]:
    """Brings a stream into the phase. After the body every page must be free; in decode, the other stream finishes."""
    caller.wait_idle()
    others: list[tuple[Ask, Stream]] = []

    def start(ask: Ask, **more: float) -> Stream:
        return caller.generate(ask.request(), **more)

    if phase == "queued":
        for _ in range(2):
            others.append((LONG, start(LONG)))
            others[-1][1].wait_tokens(1)
        victim = Victim(start(LONG_NAMED, **settings), others)
        victim.stream.wait_accepted()
        assert caller.load().waiting == 1
    elif phase == "prefill":
        named = Ask(prompt=SLOW_START.prompt, max_new_tokens=4, request_id="victim")
        victim = Victim(start(named, **settings), others)
        caller.wait_load(lambda load: load.running == 1)
        assert victim.stream.transcript.tokens == []
    elif phase == "decode":
        others.append((LONG, start(LONG)))
        victim = Victim(start(LONG_NAMED, **settings), others)
        victim.stream.wait_tokens(3)
    else:
        # Both need 48 of 75 pages in the end, so the newer one is preempted.
        before = caller.load().preemptions
        others.append((LONG, start(LONG)))
        others[0][1].wait_accepted()
        victim = Victim(start(LONG_NAMED, **settings), others)
        caller.wait_load(lambda load: load.preemptions > before)
        load = caller.load()
        assert (load.running, load.waiting) == (1, 1)
        assert 0 < len(victim.stream.transcript.tokens) < 180
    yield victim
    for ask, stream in others:
        if phase == "decode":
            ask.check(stream.result())
        else:
            stream.cancel()
    caller.wait_idle()


LONG_NAMED = Ask(prompt=LONG.prompt, max_new_tokens=180, request_id="victim")


def _prefix_of(ask: Ask, tokens: list[int]) -> bool:
    return ask.expected().tokens[: len(tokens)] == tokens


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_frees_the_row_at_once(slow: Caller, phase: str) -> None:
    with brought_to(phase, slow) as victim:
        running = slow.load().running
        victim.stream.cancel()
        assert code_of(victim.stream.failed()) == grpc.StatusCode.CANCELLED
        # The row or queue entry is freed at once, long before the other streams end.
        slow.wait_load(
            lambda load: (
                load.waiting == 0 and load.running == (running if phase in ("queued", "preempted") else running - 1)
            )
        )
        assert not any(stream.ended for _, stream in victim.others)


@pytest.mark.parametrize("phase", PHASES)
def test_abort_ends_the_stream_with_its_tokens(slow: Caller, phase: str) -> None:
    with brought_to(phase, slow) as victim:
        outcomes = slow.abort("victim", "unknown")
        assert outcomes == [control_pb2.ABORT_OUTCOME_ABORTED, control_pb2.ABORT_OUTCOME_NOT_FOUND]
        transcript = victim.stream.result()
        assert transcript.reason == "ABORTED"
        ask = SLOW_START if phase == "prefill" else LONG
        assert _prefix_of(ask, transcript.tokens)
        assert transcript.finished.output_tokens == len(transcript.tokens)
        assert transcript.summary.usage.output_tokens == len(transcript.tokens)
        assert slow.abort("victim") == [control_pb2.ABORT_OUTCOME_NOT_FOUND]


@pytest.mark.parametrize("phase", ["queued", "decode"])
def test_a_deadline_ends_the_stream_and_frees_it(slow: Caller, phase: str) -> None:
    with brought_to(phase, slow, timeout=1.2) as victim:
        error = victim.stream.failed()
        assert code_of(error) == grpc.StatusCode.DEADLINE_EXCEEDED
        slow.wait_load(lambda load: load.waiting == 0 and load.running <= len(victim.others))
        assert _prefix_of(LONG, victim.stream.transcript.tokens)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_time_limit_ends_the_stream_with_its_tokens(slow: Caller, phase: str) -> None:
    ask = Ask(
        prompt=SLOW_START.prompt if phase == "prefill" else LONG.prompt, max_new_tokens=4 if phase == "prefill" else 180
    )
    blockers = [slow.generate(LONG.request()) for _ in range(2 if phase == "queued" else 0)]
    for blocker in blockers:
        blocker.wait_tokens(1)
    request = ask.request()
    request.stop.max_time_seconds = {"queued": 0.3, "prefill": 0.1, "decode": 1.0}[phase]
    transcript = slow.generate(request).result()
    assert transcript.reason == "TIME_LIMIT"
    assert _prefix_of(ask, transcript.tokens)
    assert bool(transcript.tokens) == (phase == "decode")
    assert transcript.finished.output_tokens == len(transcript.tokens)
    assert transcript.summary.timing.total_seconds >= request.stop.max_time_seconds - 0.001
    for blocker in blockers:
        blocker.cancel()
    slow.wait_idle()


def test_a_request_past_its_deadline_never_runs(slow: Caller) -> None:
    steps = slow.wait_idle().steps
    error = slow.generate(LONG.request(), timeout=1e-6).failed()
    assert code_of(error) == grpc.StatusCode.DEADLINE_EXCEEDED
    assert slow.wait_idle().steps <= steps + 2


def test_cancels_at_random_moments_free_everything(slow: Caller) -> None:
    asks, num_cancelled = [LONG, SLOW_START], 0
    for round_idx in range(4):
        streams = [slow.generate(asks[i % 2].request()) for i in range(8)]
        streams[round_idx].wait_accepted()
        for i, stream in enumerate(streams):
            if i % 3 == round_idx % 3:
                slow.load()
            stream.cancel()
        for i, stream in enumerate(streams):
            # A stream may have ended before its cancel.
            if stream.wait_end().error is None:
                asks[i % 2].check(stream.result())
            else:
                assert code_of(stream.failed()) == grpc.StatusCode.CANCELLED
                num_cancelled += 1
        slow.wait_idle()
    assert num_cancelled > 0
    answer(slow, LONG)


def test_a_duplicate_id_is_refused_while_the_first_request_runs(slow: Caller) -> None:
    first = slow.generate(LONG_NAMED.request())
    first.wait_tokens(1)
    error = slow.generate(LONG_NAMED.request()).failed()
    assert code_of(error) == grpc.StatusCode.ALREADY_EXISTS
    assert "victim" in error.details()
    LONG.check(first.result())
    # The id is free once its request has ended.
    again = Ask(prompt=LONG.prompt, max_new_tokens=5, request_id="victim")
    answer(slow, again)
