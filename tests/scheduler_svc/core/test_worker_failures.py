"""Failures of a worker: values that are not finite, its loss, timeouts, failed steps. Exact plans and times."""

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import World, greedy

POISON = 280
ONE_PAGE = Shape(page_size=4, num_pages=2)


def rows_of(world: World) -> list[list[int]]:
    """Returns the rows of each plan, ascending."""
    return [sorted([*plan.chunk_rows.tolist(), *plan.decode_rows.tolist()]) for plan in world.sent]


def zeroed(world: World) -> list[list[int]]:
    """Returns the pages that each plan zeroes, ascending."""
    return [sorted(plan.zero_pages.tolist()) for plan in world.sent]


# Values that are not finite -----------------------------------------------------------------------------------


def test_pages_of_a_normal_end_are_not_zeroed() -> None:
    world = World(ONE_PAGE)
    for token in (1, 2):
        world.submit([token, token], max_new_tokens=3, ignore_eos=True)
    world.finish()
    assert all(pages == [] for pages in zeroed(world))


def test_the_page_of_a_request_cancelled_before_its_result_is_zeroed() -> None:
    world = World(ONE_PAGE, greedy(plans_in_flight=1), faults=Faults(nonfinite_token=POISON))
    poisoned = world.submit([1, POISON], max_new_tokens=3)
    next_request = world.submit([2, 2], max_new_tokens=3, ignore_eos=True)
    world.tick()
    world.cancel(poisoned)
    world.settle()
    assert zeroed(world) == [[], [1], [], []]
    assert len(world.streams[next_request].tokens) == 3


def test_a_page_that_finite_samples_have_read_in_part_is_zeroed() -> None:
    second = World()
    second.submit([1, 2], max_new_tokens=2, ignore_eos=True)
    second.run()
    world = World(ONE_PAGE, greedy(plans_in_flight=1), faults=Faults(nonfinite_token=second.streams[1].tokens[1]))
    poisoned = world.submit([1, 2], max_new_tokens=3, ignore_eos=True)
    next_request = world.submit([5, 5], max_new_tokens=3, ignore_eos=True)
    world.steps(2)
    # The last position of page 1 is being computed. The three before it are verified.
    world.tick()
    assert len(world.streams[poisoned].tokens) == 2
    world.cancel(poisoned)
    world.settle()
    assert zeroed(world) == [[], [], [], [1], [], []]
    assert len(world.streams[next_request].tokens) == 3


def test_only_pages_that_are_allocated_again_are_zeroed_after_a_reset() -> None:
    world = World(Shape(page_size=4, num_pages=9), faults=Faults(nonfinite_token=POISON, fail_steps=frozenset({2})))
    world.submit([1, POISON], max_new_tokens=6)
    other = world.submit([2, 2], max_new_tokens=3, ignore_eos=True)
    world.tick()
    world.apply(), world.apply()
    # The first result is not finite, the second one is FAILED, and no plan is made between them.
    world.deliver(), world.deliver()
    world.settle()
    # Page 1 is not allocated again. The other request gets its page 2 again, which the failed step was writing.
    assert zeroed(world)[:3] == [[], [], [2]]
    assert len(world.streams[other].tokens) == 3


# The loss of a worker -----------------------------------------------------------------------------------------


def test_the_loss_of_a_worker_counts_recomputed_tokens() -> None:
    world = World(config=greedy(plans_in_flight=3))
    stream = world.submit([1, 2, 3, 4, 5], max_new_tokens=4, ignore_eos=True)
    world.step()
    world.tick()
    # Five positions are confirmed and three more are planned. Only the confirmed ones count as recomputed.
    world.restart()
    world.finish()
    stats = world.end(stream).stats
    assert (stats.recomputed_tokens, stats.worker_changes, stats.preemptions) == (5, 1, 0)
    assert (stats.output_tokens, stats.discarded_tokens) == (4, 0)


# Timeouts -----------------------------------------------------------------------------------------------------

SHORT_TIMEOUTS = greedy(step_timeout_seconds=3.0, silence_timeout_seconds=9.0)


def test_a_silent_idle_worker_times_out() -> None:
    world = World(config=SHORT_TIMEOUTS)
    assert world.core.next_wake() == pytest.approx(9.0)
    world.tick(8.9)
    assert not world.is_lost
    world.tick(0.2)
    assert world.is_lost
    assert fx.AskRejoin(worker=world.worker) in world.effects


def test_a_heartbeat_restarts_the_silence_timeout() -> None:
    world = World(config=SHORT_TIMEOUTS)
    world.now = 8.0
    world.handle(ev.WorkerAlive(worker=world.worker))
    world.tick(8.9)
    assert not world.is_lost
    assert world.core.next_wake() == pytest.approx(17.0)


def test_a_result_restarts_the_silence_timeout() -> None:
    world = World(config=SHORT_TIMEOUTS)
    world.now = 7.0
    world.submit([1], max_new_tokens=1, ignore_eos=True)
    world.step(1.0)
    assert world.end(1).reason is fx.EndReason.LENGTH
    assert world.core.next_wake() == pytest.approx(17.0)
    world.tick(8.9)
    assert not world.is_lost


def test_the_timeout_of_a_step_starts_when_the_one_before_it_ends() -> None:
    world = World(config=SHORT_TIMEOUTS)
    world.submit([1], max_new_tokens=9, ignore_eos=True)
    world.tick()
    world.apply()
    world.now = 2.9
    world.deliver()
    # The second plan was sent at 0 too, but the worker began it when the first had ended.
    world.tick(2.9)
    assert not world.is_lost
    assert world.core.next_wake() == pytest.approx(5.9)
    world.tick(0.2)
    assert world.is_lost


# Failed steps -------------------------------------------------------------------------------------------------


def failed_once(status: int = pb.STEP_STATUS_FAILED) -> World:
    """Returns a world of two requests in which the first step failed, with one plan in flight at a time."""
    world = World(config=greedy(plans_in_flight=1))
    for token in (1, 2):
        world.submit([token], max_new_tokens=3, ignore_eos=True)
    world.tick()
    world.apply()
    world.results[0].status = status
    world.deliver()
    # After a failed step the worker continues with the next generation and empty tables.
    world.executor.begin(2)
    return world


def test_suspects_run_alone_until_they_have_sampled_and_others_every_second_step() -> None:
    world = failed_once()
    world.finish()
    assert rows_of(world) == [[1, 2], [1], [1], [2], [1, 2], [2]]
    assert world.core.suspects.handles == set()


def test_no_request_shares_a_plan_with_a_suspect() -> None:
    world = World(config=greedy(plans_in_flight=2), faults=Faults(fail_steps=frozenset({1})))
    suspect = world.submit([1], max_new_tokens=4, ignore_eos=True)
    world.step()
    world.sent.clear()
    world.plans.clear()
    world.submit([2], max_new_tokens=4, ignore_eos=True, priority=-1)
    world.tick()
    urgent = world.submit([3], max_new_tokens=4, ignore_eos=True, priority=9)
    world.tick()
    # Only one plan of a suspect is in flight, so that a death names its position.
    assert rows_of(world) == [[1]]
    world.work()
    assert len(world.streams[suspect].tokens) == 1
    world.tick()
    # The suspect has sampled a token, so the other two are admitted in the queue's order.
    assert rows_of(world)[1:] == [[1, 2, 3], [1, 2, 3]]
    assert world.sent[1].starts[0].tokens.tolist() == world.streams[urgent].submit.prompt.tolist()
    world.finish()


def test_a_request_of_higher_priority_starts_after_the_first_step_of_a_trial() -> None:
    world = failed_once()
    urgent = world.submit([3], max_new_tokens=3, ignore_eos=True, priority=9)
    world.submit([4], max_new_tokens=3, ignore_eos=True, priority=-9)
    world.finish()
    assert world.sent[2].starts[0].tokens.tolist() == world.streams[urgent].submit.prompt.tolist()
    # The first suspect alone; it and the urgent request; the second suspect alone. It is not overtaken by the last one.
    assert rows_of(world)[1:5] == [[1], [1, 2], [3], [1, 2, 3, 4]]


@pytest.mark.parametrize("status", [pb.STEP_STATUS_OUT_OF_SYNC, pb.STEP_STATUS_SKIPPED])
def test_a_step_that_was_not_computed_makes_no_suspects(status: int) -> None:
    world = failed_once(status)
    assert world.core.suspects.handles == set()
    world.finish()
    assert rows_of(world) == [[1, 2]] * 4


# Wrong tokens -------------------------------------------------------------------------------------------------


def test_a_banned_stop_token_does_not_end_the_request(world: World) -> None:
    stream = world.submit([1], max_new_tokens=1, min_new_tokens=1, stop_token_ids=(7,))
    world.tick()
    world.apply()
    world.results[0].tokens = np.array([7], "<i4").tobytes()
    world.deliver()
    assert (world.end(stream).reason, world.end(stream).stop_token_id) == (fx.EndReason.LENGTH, None)
