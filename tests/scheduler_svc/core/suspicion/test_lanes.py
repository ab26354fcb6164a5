"""Trials that lose their lane, or have it drained."""

from dataclasses import replace

import pytest

from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

LARGE = Shape(page_size=4, num_pages=64, max_rows=4, max_length=64, token_budget=64)


def test_a_trial_that_fits_no_worker_gives_way_to_one_that_does() -> None:
    world = World(LARGE, greedy(plans_in_flight=2))
    long = world.submit([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    short = world.submit([4, 5, 6], max_new_tokens=8, ignore_eos=True)
    world.step()
    world.tick()
    world.kill()
    suspects = world.core.suspects
    assert len(suspects.handles) == 2
    # The next worker is lost when the trial of the long request has a lane, and no plan in flight.
    world.join()
    for _ in range(20):
        world.step()
        if suspects.members() and not world.plans:
            break
    assert [request.stream for request in suspects.members()] == [long]
    world.kill()
    world.shape = replace(LARGE, max_length=16)
    world.join()
    world.run()
    assert world.end(short).reason is not None
    assert world.end_of(long) is None
    world.shape = LARGE
    world.join()
    world.settle()
    assert world.end(long).reason is not None and not suspects.handles


def with_suspects(count: int) -> Fleet:
    """A fleet whose only worker has died with so many requests."""
    fleet = Fleet(LARGE)
    for n in range(3, 3 + count):
        fleet.submit([n, n + 1, n + 2], max_new_tokens=12, ignore_eos=True)
    fleet.step()
    fleet.tick()
    fleet.lose("a")
    assert len(fleet.core.suspects.handles) == count
    return fleet


def check_acquitted(fleet: Fleet) -> None:
    fleet.settle()
    assert all(fleet.end(stream).reason is not None for stream in fleet.streams) and not fleet.core.suspects.handles


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "answers"])
def test_a_trial_leaves_a_drained_worker_after_its_last_plan_there(dies: bool) -> None:
    """Until then no suspect runs on the other worker: a death would be of one of two groups."""
    fleet = with_suspects(4)
    suspects = fleet.core.suspects
    fleet.join_as(LARGE)
    fleet.join_as(LARGE)
    trial_on = next(name for name in "bc" for _ in range(9) if runs_trial(fleet, name))
    fleet.handle(ev.Drain(frontend=FRONTEND, query=1, worker=trial_on, max_seconds=0.0, force=True))
    fleet.tick()
    assert suspects.trial is not None and suspects.trial.worker == trial_on
    # The audit follows each event.
    if dies:
        fleet.lose(trial_on)
    else:
        fleet.step()
        fleet.tick()
        assert suspects.trial.worker not in ("", trial_on)
    check_acquitted(fleet)


def test_a_trial_whose_only_worker_is_drained_keeps_its_plan_in_flight() -> None:
    fleet = with_suspects(2)
    suspects = fleet.core.suspects
    fleet.join_as(LARGE)
    assert any(runs_trial(fleet, "b") for _ in range(9))
    fleet.handle(ev.Drain(frontend=FRONTEND, query=1, worker="b", max_seconds=5.0, force=True))
    # The audit follows each event: a suspect in flight is in the trial.
    fleet.tick()
    assert suspects.trial is not None
    fleet.join_as(LARGE)
    check_acquitted(fleet)


def runs_trial(fleet: Fleet, name: str) -> bool:
    """Ticks; whether the worker then has a plan of a trial that it has not applied."""
    fleet.tick()
    return fleet.core.suspects.is_trial(fleet.lane_of(name).in_flight)


def test_what_only_the_trials_worker_holds_runs_while_that_prepares() -> None:
    """Two workers serve, and after two deaths a trial has one of them to itself."""
    fleet = Fleet(LARGE)
    suspect = fleet.submit([1, 2, 3], max_new_tokens=20, constraint=b"a toy, toy_complete=9")
    for name in "ab":
        while fleet.running(name) != [suspect]:
            fleet.steps(2, 0.01)
        fleet.tick()
        fleet.join_as(LARGE)
        fleet.lose(name)
    fleet.holds_answers = True
    small = fleet.join_as(replace(LARGE, max_length=16))
    other = fleet.submit([4, 5, 6], max_new_tokens=30, ignore_eos=True)
    fleet.run()
    assert fleet.core.suspects.is_repeated() and fleet.core.suspects.handles
    assert fleet.end(other).reason is not None and not fleet.started(small)
    # Prepared, the trial goes on.
    fleet.holds_answers = False
    fleet.settle()
    assert fleet.end(suspect).reason is not None and not fleet.core.suspects.handles
