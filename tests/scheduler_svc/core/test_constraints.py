"""Constraints in the core: when they are sent, when their rows run, how they end, and what is freed."""

from dataclasses import replace
from hashlib import sha256

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import World

SHAPE = Shape(page_size=4, num_pages=60, max_rows=4, max_length=64, chunk_align=4, token_budget=24)
ANSWER_SECONDS = KINDS[CONSTRAINT].answer_seconds
SOURCE = b"a toy, toy_complete=6"


NAME = sha256(SOURCE).digest()


def sent(world: World, kind: type[fx.PrepareResource | fx.DropResource]) -> list[bytes]:
    """The constraints of these orders, in order."""
    return [effect.hash for effect in world.told(kind)]


def test_a_constraint_is_sent_once_and_its_output_ends_where_it_is_complete(world: World) -> None:
    streams = [world.submit([1, 2, i], max_new_tokens=20, constraint=SOURCE) for i in range(3)]
    world.run()
    assert sent(world, fx.PrepareResource) == [NAME]
    assert {world.end(stream).reason for stream in streams} <= {fx.EndReason.CONSTRAINT_COMPLETE, fx.EndReason.EOS}
    assert world.end(streams[0]).reason is fx.EndReason.CONSTRAINT_COMPLETE
    assert len(world.streams[streams[0]].tokens) == 6
    world.check_all_ended()


def test_a_long_prompt_is_computed_while_its_constraint_is_prepared(world: World) -> None:
    world.holds_answers = True
    stream = world.submit(list(range(1, 31)), constraint=SOURCE)
    world.run()
    # 28 of 30 positions: the last aligned one before the end.
    assert [plan.chunk_counts.tolist() for plan in world.sent] == [[24], [4]]
    assert not any(plan.chunk_samples.any() for plan in world.sent)
    assert world.sent[0].starts[0].constraint == NAME
    assert world.streams[stream].tokens == []
    world.answer()
    world.run()
    assert world.sent[2].chunk_counts.tolist() == [2]
    world.check_all_ended()


def test_a_short_prompt_waits_and_later_requests_start_before_it(world: World) -> None:
    world.holds_answers = True
    first = world.submit([1, 2], constraint=SOURCE)
    second = world.submit([3, 4], max_new_tokens=3)
    world.run()
    assert world.end_of(first) is None and world.end_of(second) is not None
    world.answer()
    world.finish()


def test_a_row_without_a_mask_fails_alone(world: World) -> None:
    late = world.submit([1, 2], max_new_tokens=20, constraint=b"toy_fail=3 toy_complete=9")
    others = [world.submit([3], max_new_tokens=8, ignore_eos=True), world.submit([4], constraint=SOURCE)]
    world.run()
    assert world.fault(late) == "the constraint took longer than 250 ms at output token 3"
    assert len(world.streams[late].tokens) == 2
    assert all(world.end(stream).reason is not None for stream in others)
    assert world.core.counters.resets == 0 and not world.core.suspects
    world.check_all_ended()


def test_rows_that_fail_in_one_step_each_get_a_reason_of_their_own(world: World) -> None:
    streams = [world.submit([1, i], max_new_tokens=20, constraint=b"toy_fail=2") for i in range(2)]
    world.run()
    details = [world.fault(stream) for stream in streams]
    assert details == ["the constraint took longer than 250 ms at output token 2", "the constraint failed"]


def test_the_last_allowed_token_that_completes_is_no_length_stop(world: World) -> None:
    stream = world.submit([5, 6], max_new_tokens=6, constraint=SOURCE)
    world.run()
    assert world.end(stream).reason is fx.EndReason.CONSTRAINT_COMPLETE
    world.check_all_ended()


def test_a_constraint_is_dropped_with_its_last_request_and_not_before_its_last_plan(world: World) -> None:
    stream = world.submit([1, 2], max_new_tokens=20, constraint=SOURCE)
    world.steps(4)
    assert len(world.core.sources) == 1
    world.tick()
    assert world.lane.in_flight
    world.cancel(stream)
    assert len(world.core.sources) == 0
    world.tick()
    assert sent(world, fx.DropResource) == []
    world.run()
    assert sent(world, fx.DropResource) == [NAME]
    assert world.executor.violations == []


def test_a_constraint_that_another_request_brings_in_time_is_not_dropped(world: World) -> None:
    first = world.submit([1, 2], max_new_tokens=20, constraint=SOURCE)
    world.steps(4)
    world.tick()
    world.cancel(first)
    world.submit([3, 4], max_new_tokens=20, constraint=SOURCE)
    world.run()
    assert sent(world, fx.PrepareResource) == sent(world, fx.DropResource) == [NAME]
    assert world.executor.violations == []
    world.check_empty()


def test_a_constraint_that_is_still_prepared_is_dropped_after_its_answer(world: World) -> None:
    world.holds_answers = True
    first = world.submit([1, 2], constraint=SOURCE)
    world.tick()
    world.cancel(first)
    world.submit([3])
    world.run()
    assert sent(world, fx.DropResource) == []
    world.answer()
    world.run()
    assert sent(world, fx.DropResource) == [NAME]
    assert world.executor.violations == []


def test_an_answer_that_never_comes_ends_its_requests_alone(world: World) -> None:
    world.holds_answers = True
    stuck, other = world.submit([1], constraint=SOURCE), world.submit([2])
    world.run()
    name = world.worker
    world.now += ANSWER_SECONDS / 2
    world.handle(ev.Paused(seconds=ANSWER_SECONDS))
    world.handle(ev.WorkerAlive(worker=name))
    for _ in range(80):
        world.now += 1 + ANSWER_SECONDS / 80
        world.handle(ev.WorkerAlive(worker=name))
        world.tick()
        if world.end_of(stuck):
            break
    assert world.fault(stuck).endswith(f"worker {name} has not prepared it within {ANSWER_SECONDS:g} s")
    assert world.now > 1.5 * ANSWER_SECONDS, "the pause counted"
    # The late answer finds no request, so the worker drops what it has.
    world.answer()
    assert sent(world, fx.DropResource) == [NAME]
    assert world.end_of(other) is not None
    world.check_empty()


def test_all_sources_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, CONSTRAINT, replace(KINDS[CONSTRAINT], max_total_bytes=100))
    world = World(SHAPE, join=True)
    large = [bytes([65 + i]) * 40 for i in range(3)]
    streams = [world.submit([i], num_samples=2, constraint=source) for i, source in enumerate((*large[:2], large[0]))]
    assert world.core.sources.num_bytes(CONSTRAINT) == 80, "three requests of two samples have two sources"
    refused = world.submit([9], constraint=large[2])
    rejected = world.refusal(refused)
    assert rejected.code is fx.RejectCode.QUEUE_FULL
    assert rejected.message.endswith("have 80 bytes and this one has 40; the limit is 100")
    for stream in streams:
        for number in world.streams[stream].submit.streams:
            world.cancel(number)
    assert world.core.sources.num_bytes(CONSTRAINT) == 0
    assert world.streams[world.submit([9], constraint=large[2])].rejected is None


def test_a_tenant_leaves_room_for_the_constraints_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, CONSTRAINT, replace(KINDS[CONSTRAINT], max_total_bytes=100))
    world = World(SHAPE, join=True)
    first = world.submit([1], constraint=b"a" * 45, tenant="greedy")
    refused = world.submit([2], constraint=b"b" * 20, tenant="greedy")
    rejected = world.refusal(refused)
    assert rejected.code is fx.RejectCode.QUEUE_FULL
    assert rejected.message == "the caller's own constraints have 45 bytes and this one has 20; the limit is 55 now"
    # A source that is there takes no more room if another tenant uses it.
    assert world.streams[world.submit([3], constraint=b"a" * 45, tenant="greedy")].rejected is None
    polite = world.submit([4], constraint=b"c" * 27, tenant="polite")
    assert world.streams[polite].rejected is None
    for stream in (first, polite):
        world.cancel(stream)
    assert world.core.sources.num_bytes(CONSTRAINT) == 45, "another request still uses it"


def test_an_ended_request_that_lingers_keeps_no_source(world: World) -> None:
    stream = world.submit([1], constraint=SOURCE, linger_seconds=60.0)
    world.run()
    world.end(stream)
    assert len(world.core.kept) == 1 and len(world.core.sources) == 0


def test_an_idle_lane_that_is_ready_starts_what_another_must_prepare_for() -> None:
    """All three lanes become idle at once: the first must prepare, the second leaves the request to it."""
    fleet = Fleet(*[replace(SHAPE, max_rows=1)] * 3)
    for _ in range(2):
        fleet.submit([1, 2], max_new_tokens=4, ignore_eos=True)
    fleet.submit([1, 2], max_new_tokens=4, constraint=b"a toy, toy_complete=4")
    fleet.steps(2)
    fleet.holds_answers = True
    waits = fleet.submit([3, 4], max_new_tokens=2, constraint=b"a toy, toy_complete=4")
    fleet.run()
    assert fleet.started("c")[-1] == [3, 4] and fleet.end_of(waits) is not None
