"""Requests without a maximum by their callers: where they run, where they end, and what is counted for them before."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.events import EXPECTED_TOKENS
from scheduler_svc.core.messages.operators import TenantLimits, TenantsChanged
from scheduler_svc.core.messages.reports import DrainReport
from scheduler_svc.core.queue.quotas import Bucket
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.stream import Stream
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

# Of 40 tokens, the pages hold 17.
SMALL = Shape(page_size=4, num_pages=5, max_length=40)
LARGE = replace(SMALL, num_pages=20)
TEN = list(range(10))
WAIT = greedy(max_worker_wait_seconds=100.0, silence_timeout_seconds=1e6)


def ask(world: World, prompt: list[int] = TEN, **options: Any) -> int:
    return world.submit(prompt, **{"max_new_tokens": None, "ignore_eos": True, **options})


def ended(world: World, stream: int) -> tuple[fx.EndReason | None, int]:
    """Returns why a stream ended, and the number of its tokens, which are the oracle's."""
    tokens = world.streams[stream].tokens
    assert tokens == list(world.streams[stream].expected(world.shape).tokens[: len(tokens)])
    return world.end(stream).reason, len(tokens)


def grow(world: World, stream: int, tokens: int) -> None:
    """Steps until the stream has `tokens` tokens."""
    for _ in range(2000):
        if len(world.streams[stream].tokens) == tokens:
            return
        world.step(0.001)
    raise AssertionError(f"{len(world.streams[stream].tokens)} of {tokens} tokens")


def large_world() -> World:
    world = World(Shape(page_size=4, num_pages=2000, max_length=4000))
    world.audit_every = 64
    return world


# Room -----------------------------------------------------------------------------------------------------------------


def test_a_pool_smaller_than_the_context_ends_the_output_and_refuses_nobody() -> None:
    world = World(SMALL)
    refused = world.submit(TEN, max_new_tokens=30)
    assert world.streams[refused].rejected is not None
    streams = [ask(world), ask(world, num_samples=2, temperature=1.0)]
    world.finish()
    assert [ended(world, stream) for stream in (streams[0], streams[1], streams[1] + 1)] == [
        (fx.EndReason.CONTEXT_FULL, 7)
    ] * 3


def test_a_smaller_limit_of_the_operator_ends_with_length() -> None:
    world = World(SMALL)
    stream = ask(world)
    other = replace(world.streams[stream].submit, stream=9, request_id="r9", max_new_tokens=3)
    world.streams[9] = Stream(other)
    world.handle(other)
    world.run()
    assert ended(world, 9) == (fx.EndReason.LENGTH, 3)


@pytest.mark.parametrize(
    ("length", "min_new_tokens", "field", "message"),
    [
        (17, 0, "token_ids", "prompt (17 tokens) and one output token take 5 pages of 4 tokens; the pool has 4"),
        (10, 8, "stop.min_new_tokens", "prompt (10 tokens) and min_new_tokens (8) take 5 pages of 4 tokens; "
            "the pool has 4"),
        (40, 0, "token_ids", "the prompt and one output token make 41 tokens; the limit is 40"),
        (16, 0, "", ""),
        (10, 7, "", ""),
    ],
)  # fmt: skip
def test_only_what_the_caller_has_set_is_refused(length: int, min_new_tokens: int, field: str, message: str) -> None:
    world = World(SMALL)
    stream = ask(world, list(range(length)), min_new_tokens=min_new_tokens)
    rejected = world.streams[stream].rejected
    assert (("", "") if rejected is None else (rejected.field, rejected.message)) == (field, message)
    world.finish()


def test_a_request_runs_on_a_small_worker_and_moves_to_a_larger_one_when_that_is_full() -> None:
    fleet = Fleet(LARGE, SMALL, config=WAIT)
    # The first worker has more to do, so the second request starts on the small one.
    first, second = ask(fleet, list(range(30, 60))), ask(fleet)
    fleet.step(0.001)
    assert (fleet.running("a"), fleet.running("b")) == ([first], [second])
    grow(fleet, second, 6)
    assert fleet.running("b") == [second]
    fleet.finish()
    assert ended(fleet, first) == (fx.EndReason.CONTEXT_FULL, 10)
    assert ended(fleet, second) == (fx.EndReason.CONTEXT_FULL, 30)
    assert fleet.end(second).stats.preemptions == 1


@pytest.mark.parametrize("tokens", [6, 7, 12])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_outlives_the_only_worker_that_holds_it(tokens: int, comes_back: bool) -> None:
    fleet = Fleet(LARGE, config=WAIT)
    stream = ask(fleet)
    grow(fleet, stream, tokens)
    fleet.lose("a")
    fleet.join_as(SMALL)
    fleet.run()
    # A small worker goes on as far as it can.
    assert len(fleet.streams[stream].tokens) == max(7, tokens) and fleet.streams[stream].end is None
    if comes_back:
        fleet.join_as(LARGE)
        fleet.run()
        assert ended(fleet, stream) == (fx.EndReason.CONTEXT_FULL, 30)
        return
    fleet.tick(99.0)
    assert fleet.streams[stream].end is None
    fleet.tick(2.0)
    fleet.run()
    assert ended(fleet, stream) == (fx.EndReason.CONTEXT_FULL, max(7, tokens))


def test_a_prompt_that_lost_its_only_large_worker_waits_for_one_as_ever() -> None:
    fleet = Fleet(LARGE, config=WAIT)
    stream = ask(fleet, list(range(20)))
    fleet.lose("a")
    fleet.join_as(SMALL)
    fleet.tick(101.0)
    failure = fleet.failure(stream)
    assert failure.code is fx.FailureCode.NO_WORKER
    assert "its 21 tokens (prompt, output so far and what must follow)" in failure.message


def test_a_request_that_arrives_while_no_worker_is_present_ends_where_the_next_one_is_full() -> None:
    fleet = Fleet(LARGE, config=WAIT)
    fleet.lose("a")
    stream = ask(fleet)
    assert fleet.streams[stream].submit.max_new_tokens == 30
    fleet.tick(1.0)
    fleet.join_as(SMALL)
    fleet.run()
    fleet.tick(101.0)
    assert ended(fleet, stream) == (fx.EndReason.CONTEXT_FULL, 7)


def test_a_token_that_comes_after_the_row_was_taken_may_fill_the_worker() -> None:
    """A tenant with a better claim takes the row while the last token that fits is in flight."""
    fleet = Fleet(LARGE, config=WAIT)
    fleet.handle(TenantsChanged(limits={"acme": TenantLimits(), "other": TenantLimits()}))
    streams = [ask(fleet, [number], tenant="acme") for number in (1, 2)]
    fleet.lose("a")
    fleet.join_as(replace(LARGE, max_length=16, max_rows=2))
    grow(fleet, streams[1], 14)
    streams.append(ask(fleet, [3], tenant="other", max_new_tokens=4))
    fleet.tick(0.001)
    [waiting] = [request for request in fleet.core.queue if request.stream == streams[1]]
    assert (waiting.row, waiting.known, waiting.pending_tokens) == (0, 15, 1)
    fleet.run()
    assert waiting.known == 16 and fleet.streams[streams[1]].end is None
    fleet.tick(101.0)
    fleet.finish()
    assert ended(fleet, streams[1]) == (fx.EndReason.CONTEXT_FULL, 15)


@pytest.mark.parametrize("tokens", [3, 12])
def test_a_restored_request_goes_on_on_a_smaller_worker_or_waits_for_a_larger(tokens: int) -> None:
    before = World(LARGE, config=WAIT)
    stream = ask(before, linger_seconds=1000.0)
    grow(before, stream, tokens)
    fleet = Fleet(config=WAIT)
    fleet.restore(stream, before, identity="identity")
    fleet.join_as(SMALL)
    fleet.run()
    fleet.join_as(LARGE)
    fleet.run()
    resumed = fleet.streams
    resumed[1] = replace(before.streams[stream], end=None)
    first = fleet.resume(1)
    assert ended(fleet, first) == (fx.EndReason.CONTEXT_FULL, 30)


# What is counted before -----------------------------------------------------------------------------------------------


def test_headroom_turns_and_drains_count_an_unset_maximum_as_the_named_estimate() -> None:
    """As if the caller had asked for it, however much of the context is left."""
    figures: list[list[object]] = []
    for most in (EXPECTED_TOKENS, None):
        world = World(Shape(page_size=4, num_pages=2000, max_length=4000, max_rows=2))
        streams = [ask(world, [number], max_new_tokens=most) for number in range(3)]
        assert all(world.streams[stream].submit.max_new_tokens == (most or 3999) for stream in streams)
        world.tick()
        lane = world.lane
        rows, queue = lane.rows, world.core.queue.tenants[""]
        world.handle(ev.Drain(frontend=FRONTEND, query=1, worker="", max_seconds=100.0))
        world.tick()
        [report] = world.told(DrainReport)[-1:]
        seated = rows.seated()
        figures.append([
            rows.remaining_bound, rows.expected(seated, rows.known[seated]).tolist(), queue.next_turn, queue.reserved,
            [request.virtual_start for request in world.core.queue], report.tokens_left,
        ])  # fmt: skip
    # The last of 256 tokens is never computed.
    assert figures[1][:2] == [2 * EXPECTED_TOKENS, [EXPECTED_TOKENS] * 2]
    assert figures[0][:2] == [2 * (EXPECTED_TOKENS - 1), [EXPECTED_TOKENS - 1] * 2]
    assert figures[0][2:] == figures[1][2:]


def test_the_estimate_stays_when_the_output_is_longer() -> None:
    world = large_world()
    stream = ask(world)
    grow(world, stream, 2 * EXPECTED_TOKENS)
    lane = world.lane
    assert lane.rows.expected(np.array([1]), lane.rows.known[[1]]).tolist() == [EXPECTED_TOKENS]


# A tenant's tokens ----------------------------------------------------------------------------------------------------

MINUTE = 100_000


@pytest.fixture
def full_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets never refill, so that what was charged is what is missing."""
    monkeypatch.setattr(Bucket, "_level_at", lambda bucket, now: bucket._level)


def limited(world: World, per_minute: int = MINUTE) -> None:
    limits = {name: TenantLimits(tokens_per_minute=per_minute) for name in ("acme", "other")}
    world.handle(TenantsChanged(limits=limits))


def charged(world: World, tenant: str = "acme") -> int:
    tokens = world.core.queue.accounts.of(tenant).tokens
    assert tokens is not None
    return MINUTE - int(tokens._level)


@pytest.mark.usefixtures("full_minute")
def test_a_tenant_is_charged_for_the_prompt_first_and_for_each_token_as_it_comes() -> None:
    world = World(LARGE)
    limited(world)
    stream, same = ask(world, tenant="acme"), ask(world, tenant="acme", num_samples=2, temperature=1.0)
    assert charged(world) == 20
    while world.streams[stream].end is None:
        world.step(0.001)
        assert charged(world) == 20 + sum(len(world.streams[number].tokens) for number in (stream, same, same + 1))
    world.run()
    assert (charged(world), charged(world, "other")) == (20 + 3 * 30, 0)


@pytest.mark.usefixtures("full_minute")
def test_a_request_is_accepted_if_the_expected_output_is_free_and_not_the_rest_of_the_context() -> None:
    world = large_world()
    limited(world, 2 * EXPECTED_TOKENS)
    first = ask(world, tenant="acme")
    assert world.streams[first].admitted
    grow(world, first, EXPECTED_TOKENS - 20)
    assert world.streams[ask(world, tenant="acme")].admitted
    world.step(0.001)
    rejected = world.refusal(ask(world, tenant="acme"))
    assert rejected.code is fx.RejectCode.RATE_LIMITED
    assert rejected.message.startswith(f"a request of an expected {10 + EXPECTED_TOKENS} tokens is accepted in ")


MOVES = st.lists(st.sampled_from(["ask", "set", "step", "step", "kill", "cancel", "finish", "abort"]), max_size=40)


@pytest.mark.usefixtures("full_minute")
@settings(max_examples=50)
@given(MOVES)
def test_what_was_made_is_charged_once_whatever_happens(moves: list[str]) -> None:
    world = World(replace(LARGE, num_pages=12, max_rows=3), greedy(max_waiting=100))
    limited(world)
    asked: list[int] = []
    for number, move in enumerate(moves):
        match move:
            case "ask" | "set":
                most = None if move == "ask" else 20
                asked.append(ask(world, [number, 1, 2], tenant="acme", max_new_tokens=most, num_samples=1 + number % 2))
            case "kill":
                world.restart()
            case "cancel" if asked:
                world.cancel(asked[number % len(asked)])
            case "finish" if asked:
                world.handle(ev.Finish(frontend=FRONTEND, stream=asked[number % len(asked)], output_tokens=1))
            case "abort" if asked:
                stream = asked[number % len(asked)]
                world.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=(f"r{stream}",)))
            case _:
                world.step(0.001)
    world.run()
    accepted = [stream for stream in asked if world.streams[stream].admitted]
    assert charged(world) == 3 * len(accepted) + world.core.counters.output_tokens
