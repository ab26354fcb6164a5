"""Tokens of a request that was preempted with plans in flight: exact times, offsets and ends."""

from dataclasses import replace

import pytest

from scheduler_svc.core.messages import effects as fx
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.rigs.oracle import complete
from tests.scheduler_svc.core.world import World, greedy

FIRST, VICTIM = [1, 2, 3], [4, 5, 6]
SHAPE = Shape(page_size=4, num_pages=3, max_rows=2)
TOKENS = complete(VICTIM, max_new_tokens=6, vocab=SHAPE.sampled_vocab).tokens


def preempted(
    shape: Shape = SHAPE, *, faults: Faults | None = None, max_new_tokens: int = 4, **options: object
) -> World:
    """Returns a world with three plans in flight. In the third, request 1 took the page of request 2, which has two
    pending tokens."""
    world = World(shape, greedy(plans_in_flight=3), faults=faults)
    world.submit(FIRST, max_new_tokens=6, ignore_eos=True)
    world.submit(VICTIM, max_new_tokens=max_new_tokens, **options)
    world.tick(1.0)
    assert [sorted([*plan.chunk_rows, *plan.decode_rows]) for plan in world.sent] == [[1, 2], [1, 2], [1]]
    [victim] = world.core.queue.by_request_id("r2")
    assert (victim.row, victim.pending_plans, victim.pending_tokens) == (0, 2, 2)
    return world


def deliver(world: World, at: float) -> None:
    """Delivers the next result without a tick."""
    world.apply()
    world.now = at
    world.deliver()


def test_pending_tokens_are_delivered_and_the_first_sets_the_first_token_time() -> None:
    world = preempted(ignore_eos=True)
    deliver(world, 3.0)
    deliver(world, 4.0)
    assert world.streams[2].tokens == list(TOKENS[:2])
    assert world.core.queue.waiting_tokens == 5
    world.finish()
    stats = world.end(2).stats
    assert (stats.queue_seconds, stats.prefill_seconds, stats.first_token_seconds) == (1.0, 2.0, 3.0)
    assert (stats.output_tokens, stats.recomputed_tokens, stats.preemptions) == (4, 0, 1)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        (fx.EndReason.EOS, {}),
        (fx.EndReason.STOP_TOKEN, {"ignore_eos": True, "stop_token_ids": (TOKENS[0],)}),
    ],
)
def test_a_pending_stop_token_ends_the_request_and_later_tokens_are_dropped(
    reason: fx.EndReason, options: dict[str, object]
) -> None:
    world = preempted(replace(SHAPE, eos_token_ids=(TOKENS[0],)), **options)
    deliver(world, 3.0)
    end = world.end(2)
    assert (end.reason, end.stop_token_id) == (reason, TOKENS[0])
    assert (end.stats.output_tokens, end.stats.discarded_tokens) == (1, 1)
    world.finish()


def test_a_pending_token_can_end_the_request_by_length() -> None:
    world = preempted(max_new_tokens=2, ignore_eos=True)
    deliver(world, 3.0)
    deliver(world, 4.0)
    end = world.end(2)
    assert (end.reason, end.stats.output_tokens, end.stats.discarded_tokens) == (fx.EndReason.LENGTH, 2, 0)
    assert end.stats.decode_seconds == 1.0


def test_nonfinite_logits_of_a_pending_plan_end_the_request() -> None:
    world = preempted(faults=Faults(nonfinite_token=VICTIM[-1]), ignore_eos=True)
    deliver(world, 3.0)
    end = world.end(2)
    assert end.failure is not None
    assert end.failure.code is fx.FailureCode.INTERNAL
    assert (end.stats.output_tokens, end.stats.discarded_tokens) == (0, 1)
    world.settle()


def test_a_request_with_pending_plans_is_not_admitted() -> None:
    world = preempted(ignore_eos=True)
    deliver(world, 3.0)
    world.cancel(1)
    # Rows and pages are free, but one plan from before the preemption is still in flight.
    world.tick()
    assert len(world.sent) == 3
    deliver(world, 4.0)
    world.tick()
    assert [start.tokens.tolist() for start in world.sent[3].starts] == [[*VICTIM, *TOKENS[:2]]]
    world.settle()


def test_offsets_continue_after_a_second_preemption() -> None:
    world = preempted(max_new_tokens=6, ignore_eos=True)
    deliver(world, 3.0)
    world.cancel(1)
    deliver(world, 4.0)
    world.tick()
    assert not world.is_lost
    # The request resumes with five tokens on two of three pages. The next request takes the third, then one of the two.
    world.leave()
    world.shape = replace(SHAPE, num_pages=4)
    world.join()
    world.submit([7, 8, 9], max_new_tokens=6, ignore_eos=True, priority=1)
    world.tick()
    [victim] = world.core.queue.by_request_id("r2")
    assert (victim.row, victim.preemptions, victim.pending_tokens) == (0, 2, 2)
    deliver(world, 5.0)
    deliver(world, 6.0)
    assert world.streams[2].tokens == list(TOKENS[:4])
    world.settle()
    assert world.streams[2].tokens == list(TOKENS)
