"""Workers on standby: proven at once, without requests until a serving worker is lost."""

from dataclasses import replace

import pytest

from scheduler_svc.core.lanes import DEATHS, PATIENCE_SECONDS
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import StepReport
from tests.scheduler_svc.core.fleet import ROOMY, STRICT, Fleet, proven_fleet
from tests.scheduler_svc.core.sent_plans import load
from tests.scheduler_svc.core.world import FRONTEND


@pytest.fixture
def fleet() -> Fleet:
    """A serving worker, "a", and one on standby."""
    return proven_fleet(False, True)


def ask(fleet: Fleet, num: int) -> list[int]:
    return [fleet.submit([i, i, i], max_new_tokens=6, ignore_eos=True) for i in range(num)]


def seated_by(effects: list[fx.Effect]) -> list[str]:
    return [effect.worker for effect in effects if isinstance(effect, fx.WorkerProven) and effect.was_standby]


def lost(fleet: Fleet, name: str, *, is_orderly: bool = False) -> list[fx.Effect]:
    """Loses the worker and returns the effects of that event."""
    del fleet.workers[name]
    return fleet.handle(ev.WorkerLost(worker=name, reason="killed", is_orderly=is_orderly))


def test_a_standby_worker_gets_one_probation_step_and_no_request(fleet: Fleet) -> None:
    ask(fleet, 12)
    fleet.tick()
    assert len(fleet.running("a")) == 8 and fleet.core.queue.num_waiting == 4
    assert [plan.step for plan in fleet.plans_of["b"]] == [1]
    fleet.finish()
    assert len(fleet.plans_of["b"]) == 1


def test_the_loss_of_the_serving_worker_seats_the_standby_worker_in_the_same_event(fleet: Fleet) -> None:
    ask(fleet, 8)
    fleet.steps(2)
    effects = lost(fleet, "a")
    assert seated_by(effects) == ["b"]
    fleet.tick()
    assert fleet.running("b"), "none of the eight requests runs on it"
    fleet.finish()
    assert (load(fleet).workers, load(fleet).standby_workers) == (1, 0)


def test_a_worker_that_leaves_in_order_is_replaced_too(fleet: Fleet) -> None:
    assert seated_by(lost(fleet, "a", is_orderly=True)) == ["b"]


def test_a_worker_that_hangs_is_replaced_too(fleet: Fleet) -> None:
    ask(fleet, 1)
    effects = fleet.tick()
    while "a" in fleet.core.lanes:
        fleet.handle(ev.WorkerAlive(worker="b"))
        effects = fleet.tick(0.5)
    assert seated_by(effects) == ["b"]
    assert any(isinstance(effect, fx.SendPlan) and effect.worker == "b" for effect in effects)


def test_the_standby_worker_that_was_proven_first_is_seated() -> None:
    fleet = Fleet(config=STRICT)
    for is_standby in (False, True, True):
        fleet.join_as(ROOMY, is_standby=is_standby)
    fleet.tick()
    for name in "acb":
        fleet.apply_plans(name)
        fleet.now += 0.01
        fleet.deliver_from(name)
    assert seated_by(lost(fleet, "a")) == ["c"]
    assert seated_by(lost(fleet, "c")) == ["b"]


def test_each_lost_worker_is_replaced_while_standby_workers_are_left() -> None:
    fleet = proven_fleet(False, False, True)
    assert seated_by(lost(fleet, "a")) == ["c"]
    assert seated_by(lost(fleet, "b")) == []
    assert load(fleet).workers == 1


def test_the_death_of_a_standby_worker_changes_nothing(fleet: Fleet) -> None:
    ask(fleet, 2)
    fleet.step()
    before = load(fleet)
    [note] = lost(fleet, "b")
    assert isinstance(note, fx.Note) and note.message == "worker b lost: killed; it was on standby"
    assert load(fleet) == replace(before, standby_workers=0, per_worker=before.per_worker[:1])
    assert before.worker_lost_reason == "" and before.lane_resets == 0


def test_deaths_of_standby_workers_are_no_crash_loop_while_a_worker_serves() -> None:
    fleet = proven_fleet(False)
    for _ in range(2 * DEATHS):
        lost(fleet, fleet.join_as(ROOMY, is_standby=True))
    assert fleet.core.lanes.crash_loop.cause(fleet.now) == ""


def test_deaths_of_standby_workers_are_a_crash_loop_if_none_serves() -> None:
    fleet = proven_fleet(False)
    lost(fleet, "a")
    for _ in range(DEATHS - 1):
        lost(fleet, fleet.join_as(ROOMY, is_standby=True))
    assert "workers crash in a loop" in fleet.core.lanes.crash_loop.cause(fleet.now)


def test_a_worker_that_joins_again_keeps_its_seat(fleet: Fleet) -> None:
    effects = fleet.handle(fleet.workers["a"].joining())
    assert seated_by(effects) == []
    fleet.run()
    assert (load(fleet).workers, load(fleet).standby_workers) == (1, 1)


def test_a_serving_worker_that_is_refused_at_its_second_join_is_replaced(fleet: Fleet) -> None:
    other = replace(fleet.lane_of("a").info, identity="other")
    effects = fleet.handle(ev.WorkerJoined(worker="a", info=other))
    assert seated_by(effects) == ["b"]
    assert any(isinstance(effect, fx.WorkerRefused) for effect in effects)


@pytest.mark.parametrize("comes", [True, False])
def test_after_the_start_standby_workers_wait_a_moment_for_a_serving_one(comes: bool) -> None:
    """Workers join a restarted scheduler in any order."""
    fleet = proven_fleet(True)
    assert load(fleet).workers == 0
    proven_at = fleet.lane_of("a").proven_at
    assert fleet.core.next_wake() == proven_at + PATIENCE_SECONDS
    fleet.tick(PATIENCE_SECONDS - 0.1)
    if comes:
        fleet.join_as(ROOMY)
    effects = fleet.tick(0.1)
    assert seated_by(effects) == ([] if comes else ["a"])
    fleet.run()
    assert (load(fleet).workers, load(fleet).standby_workers) == (1, int(comes))


def test_a_standby_worker_that_comes_after_the_loss_is_seated_when_it_is_proven() -> None:
    fleet = proven_fleet(False)
    ask(fleet, 3)
    fleet.step()
    lost(fleet, "a")
    fleet.join_as(ROOMY, is_standby=True)
    fleet.finish()
    assert len(fleet.plans_of["b"]) > 1


def test_a_standby_worker_of_another_model_is_refused_when_it_would_be_seated() -> None:
    """It joined before any worker was proven, so nothing was known about the model then."""
    fleet = Fleet(config=STRICT)
    fleet.join_as(ROOMY, is_standby=True)
    fleet.lane_of("a").info = replace(fleet.lane_of("a").info, identity="other")
    for is_standby in (False, True):
        fleet.join_as(ROOMY, is_standby=is_standby)
    fleet.tick()
    for name in "acb":
        fleet.serve(name)
    effects = lost(fleet, "b")
    assert seated_by(effects) == ["c"]
    assert [effect.worker for effect in effects if isinstance(effect, fx.WorkerRefused)] == ["a"]


def test_callers_see_sizes_of_serving_workers_only() -> None:
    fleet = proven_fleet(False)
    larger = replace(ROOMY, max_length=200)
    fleet.join_as(larger, is_standby=True)
    fleet.step()
    assert fleet.core.info is not None and fleet.core.info.max_length == 100
    [model] = [effect for effect in lost(fleet, "a") if isinstance(effect, fx.ModelServed)]
    assert model.frontend == FRONTEND and model.info is not None and model.info.max_length == 200


def test_the_steps_file_gets_a_join_when_a_standby_worker_is_seated(fleet: Fleet) -> None:
    kinds = [str(effect.kind) for effect in lost(fleet, "a") if isinstance(effect, StepReport)]
    assert kinds == ["reset", "joined"]


def test_front_ends_hear_of_serving_workers_only() -> None:
    fleet = proven_fleet(False)
    fleet.tick()
    fleet.join_as(ROOMY, is_standby=True)
    effects = fleet.tick()
    assert [effect.workers for effect in effects if isinstance(effect, fx.CoreStatus)] == []
