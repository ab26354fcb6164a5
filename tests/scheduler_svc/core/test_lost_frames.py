"""Frames that were lost on the way: a heartbeat shows it, the lane is reset, and every stream goes on."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import ResetCause
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import World, greedy


def beat(world: World, *, num_in_flight: int = 0, done: tuple[int, int] | None = None) -> list[fx.Effect]:
    return world.handle(ev.WorkerAlive(worker=world.worker, num_in_flight=num_in_flight, done=done))


def generation(world: World) -> int:
    return world.lane.generation


def decoding(num_plans: int = 1) -> World:
    """A world with a running stream, and `num_plans` plans that have just been sent."""
    world = World(Shape(), greedy(plans_in_flight=num_plans))
    world.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True)
    world.steps(4, 0.01)
    world.tick(0.01)
    assert len(world.lane.in_flight) == num_plans
    return world


def finish(world: World) -> None:
    world.run()
    assert world.end(1).reason is fx.EndReason.LENGTH
    world.check_all_ended()


def test_a_lost_result_is_noticed_by_the_next_heartbeat() -> None:
    world = decoding()
    world.apply()
    lost = world.results.popleft()
    before = generation(world)
    assert beat(world, num_in_flight=1, done=(before, lost.step - 1)) == []
    [note, *_] = beat(world, done=(before, lost.step))
    assert isinstance(note, fx.Note) and f"the result of step {lost.step} was lost" in note.message
    assert generation(world) > before
    assert world.core.counters.resets_by_cause[ResetCause.OUT_OF_SYNC] == 1
    finish(world)


def test_a_lost_plan_is_noticed_once_it_should_have_arrived() -> None:
    world = decoding()
    lost = world.plans.popleft()
    before = generation(world)
    done = before, lost.step - 1
    world.now += 1.9
    assert beat(world, done=done) == []
    world.now += 0.2
    assert beat(world, num_in_flight=1, done=done) == []
    [note, *_] = beat(world, done=done)
    assert isinstance(note, fx.Note)
    assert f"the plan of step {lost.step} was lost: the worker does not have it after 2.1 s" in note.message
    assert generation(world) > before
    finish(world)


def test_the_plan_that_proves_a_worker_may_be_lost_too() -> None:
    world = World(Shape(), greedy(prove_workers=True))
    world.tick()
    world.plans.clear()
    world.now += 2.1
    assert beat(world, done=(0, 0)) != []
    world.step()
    assert world.lane.phases.serves


@pytest.mark.parametrize(
    "done", [lambda world: None, lambda world: (generation(world) - 1, 1000), lambda world: (generation(world), 1)]
)
def test_other_heartbeats_reset_nothing(done: Callable[[World], tuple[int, int] | None]) -> None:
    world = decoding(num_plans=2)
    before = generation(world)
    assert beat(world, num_in_flight=2, done=done(world)) == []
    assert generation(world) == before
    finish(world)


def test_a_heartbeat_that_is_read_after_a_pause_does_not_void_the_plan() -> None:
    """The worker sent it before it got the plan; then the scheduler stood still."""
    world = decoding()
    before = generation(world)
    world.now += 30.0
    world.handle(ev.Paused(seconds=30.0))
    assert beat(world, done=(before, 1)) == []
    finish(world)


def test_after_five_losses_in_a_row_the_worker_is_refused_for_now() -> None:
    world = decoding()
    for _ in range(5):
        world.plans.clear()
        world.now += 2.1
        beat(world, done=(0, 0))
        if not world.is_lost:
            world.tick()
    refused = world.told(fx.WorkerRefused)
    assert world.is_lost and [effect.retry for effect in refused] == [True]
