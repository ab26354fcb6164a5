"""Deadlines of steps that follow from their predicted time: exact times at which a worker is given up."""

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import World, greedy

# The worker measured 10 ms for a prompt token.
SLOW = Shape(token_us=10_000.0, num_pages=256, max_length=512, token_budget=256)
PREDICTING = greedy(predict_steps=True)


def busy(seconds: float = 0.01, config: CoreConfig = PREDICTING) -> World:
    """A world with a request with steps of `seconds` each, of which ten are confirmed."""
    world = World(SLOW, config)
    world.submit([1], max_new_tokens=200, ignore_eos=True)
    world.steps(10, seconds)
    return world


def remaining(world: World) -> float:
    """Time until the next worker is given up."""
    at = world.core.next_wake()
    assert at is not None
    return at - world.now


def test_short_steps_have_three_seconds() -> None:
    world = busy()
    world.tick()
    assert remaining(world) == pytest.approx(3.0)
    world.tick(2.99)
    assert not world.is_lost
    world.tick(0.02)
    assert world.is_lost
    kills = [effect for effect in world.effects if isinstance(effect, fx.KillWorker | fx.AskRejoin)]
    assert kills == [fx.KillWorker(worker=world.worker), fx.AskRejoin(worker=world.worker)]
    assert world.core.counters.hung_workers == 1
    [reason] = [effect.message for effect in world.effects if isinstance(effect, fx.Note)]
    assert "has no result after 3.0 s; the limit is 3 s (predicted 0.0" in reason


@pytest.mark.parametrize(("limit", "seconds"), [(60.0, pytest.approx(9.0, rel=0.1)), (4.0, pytest.approx(4.0))])
def test_steps_of_a_second_have_nine_seconds_or_the_step_timeout(limit: float, seconds: object) -> None:
    world = busy(1.0, greedy(predict_steps=True, step_timeout_seconds=limit))
    world.tick()
    assert remaining(world) == seconds


def test_the_first_long_prompt_after_short_steps_has_its_own_time() -> None:
    world = busy()
    world.submit([2] * 250, max_new_tokens=1)
    # The worker takes some 2.5 s for the prompt; two steps are in flight.
    world.step()
    assert remaining(world) >= 8 * 2.5 + 1


def test_each_of_two_plans_in_flight_has_its_own_time() -> None:
    world = busy(config=greedy(predict_steps=True, plans_in_flight=2))
    world.tick()
    assert len(world.lane.in_flight) == 2
    world.apply()
    world.tick(2.9)
    world.deliver()
    # The second one was sent 2.9 s ago, and begins now; a slow step before makes its time longer.
    assert 3.0 < remaining(world) < 9.0


def test_a_worker_that_never_answers_its_first_step_is_given_up() -> None:
    world = World(Shape(), greedy(predict_steps=True, prove_workers=True))
    world.tick()
    assert remaining(world) == pytest.approx(5.0)  # 8 x 0.5 s + 1 s, for the first step of a worker
    for _ in range(10):
        world.tick(0.49)
        world.handle(ev.WorkerAlive(worker=world.worker))  # heartbeats do not count while it has a plan
    world.tick(0.2)
    assert world.is_lost


def test_an_idle_worker_has_three_seconds_of_silence() -> None:
    world = World(Shape(), PREDICTING)
    world.tick(2.9)
    world.handle(ev.WorkerAlive(worker=world.worker))
    world.tick(2.9)
    assert not world.is_lost
    world.tick(0.2)
    assert world.is_lost


@pytest.mark.parametrize("working", [False, True])
def test_time_in_which_the_scheduler_did_not_run_does_not_count(working: bool) -> None:
    world = busy()
    if not working:
        world.cancel(1)
        world.run()
    world.tick()
    before = remaining(world)
    world.now += 60.0
    world.handle(ev.Paused(seconds=60.0))
    world.tick()
    assert not world.is_lost
    assert remaining(world) == pytest.approx(before)
    if working:
        # The time of the pause is not the time of the step.
        world.work()
        world.tick()
        assert remaining(world) == pytest.approx(3.0)


def test_void_plans_that_the_worker_may_still_compute_have_their_time() -> None:
    """A result of another step voids the plans in flight, and the worker may be in the middle of a long prompt."""
    world = busy()
    world.submit([2] * 250, max_new_tokens=1)
    world.step()
    world.tick()
    world.apply()
    world.results[0].step += 1
    world.deliver()
    world.cancel(1), world.cancel(2)
    world.tick()
    assert not world.lane.in_flight
    assert remaining(world) > 20.0


def test_a_hung_worker_does_not_shorten_the_time_of_another() -> None:
    fleet = Fleet(Shape(), Shape(), config=PREDICTING)
    for number in range(8):
        fleet.submit([number] * 3, max_new_tokens=100, ignore_eos=True)
    for _ in range(400):
        fleet.tick(0.02)
        fleet.serve("b")
        if "a" not in fleet.core.lanes:
            break
    assert list(fleet.core.lanes) == ["b"] and fleet.core.counters.hung_workers == 1
    for _ in range(2000):
        fleet.tick(0.02)
        fleet.serve("b")
        if not len(fleet.core.queue):
            break
    fleet.check_all_ended()
