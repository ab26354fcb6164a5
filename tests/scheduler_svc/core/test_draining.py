"""Drains: workers are emptied without an end of a stream, and the service stops in order."""

from collections.abc import Sequence
from typing import Any

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import DrainReport, DrainState
from scheduler_svc.core.operations.drains import LEAVE_SECONDS, STAY_SECONDS
from scheduler_svc.core.operations.operation import REPORT_SECONDS
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import ROOMY, Fleet, proven_fleet
from tests.scheduler_svc.core.sent_plans import load
from tests.scheduler_svc.core.world import FRONTEND


def ask(fleet: Fleet, num: int, tokens: int = 20) -> list[int]:
    return [fleet.submit([i, i, i], max_new_tokens=tokens, ignore_eos=True) for i in range(num)]


def drain(
    fleet: Fleet, worker: str, query: int = 1, max_seconds: float = 0.0, *, force: bool = False
) -> list[fx.Effect]:
    return fleet.handle(ev.Drain(frontend=FRONTEND, query=query, worker=worker, max_seconds=max_seconds, force=force))


def at_work(standbys: Sequence[bool], requests: int, tokens: int = 20) -> Fleet:
    """A fleet after a step of some requests."""
    fleet = proven_fleet(*standbys)
    ask(fleet, requests, tokens)
    fleet.step(0.01)
    return fleet


def drained(standbys: Sequence[bool], requests: int, tokens: int = 20, **options: Any) -> Fleet:
    """A fleet with its first worker drained after a step of some requests."""
    fleet = at_work(standbys, requests, tokens)
    drain(fleet, "a", **options)
    return fleet


def reports(fleet: Fleet) -> list[DrainReport]:
    return [one for one in fleet.told(DrainReport) if one.query == 1]


def dismissed(fleet: Fleet) -> list[str]:
    return [one.worker for one in fleet.told(fx.DismissWorker)]


def run_until_dismissed(fleet: Fleet, worker: str) -> None:
    for _ in range(200):
        if worker in dismissed(fleet):
            return
        fleet.step(0.01)
    raise AssertionError(f"{worker} was not dismissed")


DRAIN = ev.Drain(frontend=FRONTEND, query=1, worker="a", max_seconds=0.0, force=False)
STOPS = ev.WorkerStops(worker="a")


@pytest.mark.parametrize(
    "events",
    [(DRAIN,), (STOPS,), (STOPS, DRAIN, ev.DrainStarted())],
    ids=["drained", "asked to stop", "drained although asked to stop, and the service stops"],
)
def test_rows_move_to_another_worker_and_the_worker_is_dismissed(events: tuple[ev.Event, ...]) -> None:
    fleet = at_work([False, False], 8)
    assert fleet.running("a")
    for event in events:
        fleet.handle(event)
    run_until_dismissed(fleet, "a")
    assert not fleet.running("a")
    if DRAIN in events:
        assert reports(fleet)[-1].state is DrainState.LEAVING and reports(fleet)[-1].moved > 0
    fleet.lose("a", is_orderly=True)
    fleet.step(0.01)
    if DRAIN in events:
        assert reports(fleet)[-1].state is DrainState.DONE
    assert load(fleet).worker_lost_seconds is None
    fleet.finish()
    # The end of the worker gives no warning.
    assert fleet.told(fx.Note) == []


def test_no_request_starts_on_a_drained_worker() -> None:
    fleet = proven_fleet(False, False)
    before = fleet.started("a")
    drain(fleet, "a")
    ask(fleet, 12)
    fleet.finish()
    assert fleet.started("a") == before


def test_rows_stay_while_no_other_worker_has_room() -> None:
    fleet = at_work([False, False], 16, tokens=30)
    fleet.step(0.01)
    here = set(fleet.running("a"))
    assert len(here) == 8 == len(fleet.running("b"))
    drain(fleet, "a")
    fleet.steps(5, 0.01)
    assert set(fleet.running("a")) == here
    fleet.finish()
    assert dismissed(fleet) == ["a"]


def test_rows_that_no_other_worker_can_hold_end_on_the_drained_worker() -> None:
    fleet = proven_fleet(False)
    small = Shape(page_size=4, num_pages=128, max_rows=8, token_budget=256, max_length=12)
    fleet.join_as(small)
    fleet.step(0.01)
    long, short = fleet.submit([1, 2, 3], max_new_tokens=40, ignore_eos=True), fleet.submit([4, 5], max_new_tokens=9)
    fleet.steps(2, 0.01)
    drain(fleet, "a")
    fleet.step(0.01)
    assert (fleet.running("a"), fleet.running("b")) == ([long], [short])
    fleet.finish()
    assert dismissed(fleet) == ["a"]


def test_the_last_worker_is_refused_unless_it_is_forced() -> None:
    fleet = at_work([False], 2)
    (refused,) = drain(fleet, "a")
    assert isinstance(refused, fx.DrainRefused) and refused.code is fx.RejectCode.INVALID
    assert "a is the only worker" in refused.message
    assert drain(fleet, "a", force=True) == []
    fleet.finish()
    assert dismissed(fleet) == ["a"]


def test_two_drains_at_once_leave_one_worker() -> None:
    fleet = drained([False, False, False], 6, query=1)
    drain(fleet, "b", query=2)
    (refused,) = drain(fleet, "c", query=3)
    assert isinstance(refused, fx.DrainRefused)
    fleet.finish()
    assert sorted(dismissed(fleet)) == ["a", "b"]


def test_an_unknown_worker_is_refused_with_the_names_of_all() -> None:
    fleet = proven_fleet(False, False)
    (refused,) = drain(fleet, "zebra")
    assert isinstance(refused, fx.DrainRefused) and refused.code is fx.RejectCode.NOT_FOUND
    assert "'zebra'" in refused.message and "a, b" in refused.message


def test_a_standby_worker_is_seated_and_gets_the_rows() -> None:
    fleet = drained([False, True, True], 8, tokens=40)
    run_until_dismissed(fleet, "a")
    fleet.lose("a", is_orderly=True)
    fleet.finish()
    assert fleet.core.lanes["b"].phases.counts and not fleet.core.lanes["c"].phases.counts


def test_a_standby_worker_gets_the_seat_of_a_drained_worker_whose_heir_was_lost() -> None:
    fleet = drained([False, True], 1)
    for _ in range(20):
        fleet.step(0.01)
        if fleet.core.lanes["b"].phases.counts:
            break
    fleet.lose("b")
    fleet.join_as(ROOMY, is_standby=True)
    fleet.step(0.01)
    assert not fleet.core.lanes["c"].phases.counts
    # In the same event, so that no caller waits for the next one.
    fleet.lose("a", is_orderly=True)
    assert fleet.core.lanes["c"].phases.counts
    fleet.finish()


def test_a_standby_worker_itself_leaves_at_once_and_is_not_seated() -> None:
    fleet = proven_fleet(False, True)
    drain(fleet, "b")
    fleet.step(0.01)
    assert dismissed(fleet) == ["b"]
    fleet.lose("a")
    fleet.step(0.01)
    assert not fleet.core.lanes["b"].phases.counts


def test_the_death_of_a_drained_worker_ends_no_stream() -> None:
    fleet = drained([False, False], 16, tokens=30)
    fleet.step(0.01)
    fleet.lose("a")
    fleet.finish()
    assert reports(fleet)[-1].state is DrainState.WORKER_LOST


def test_reports_tell_how_many_tokens_are_left() -> None:
    fleet = drained([False], 1, tokens=90, force=True)
    fleet.steps(30, REPORT_SECONDS / 10)
    left = [one.tokens_left for one in reports(fleet)]
    assert left == sorted(left, reverse=True) and left[0] > 80


def test_when_the_time_is_over_the_requests_wait_for_another_worker() -> None:
    fleet = drained([False], 4, tokens=60, max_seconds=0.5, force=True)
    fleet.step(0.1)
    fleet.step(0.5)
    assert reports(fleet)[-1].state is DrainState.TIME_LIMIT and dismissed(fleet) == ["a"]
    assert fleet.core.queue.num_waiting == 4
    del fleet.workers["a"]
    fleet.join_as(ROOMY)
    fleet.finish()


def test_a_dismissed_worker_that_stays_is_closed() -> None:
    fleet = proven_fleet(False, False)
    drain(fleet, "a")
    fleet.step(0.01)
    assert dismissed(fleet) == ["a"]
    fleet.now += LEAVE_SECONDS / 2 + 0.1
    for name in "ab":
        fleet.handle(ev.WorkerAlive(worker=name))
    fleet.now += LEAVE_SECONDS / 2 + 0.1
    for name in "ab":
        fleet.handle(ev.WorkerAlive(worker=name))
    fleet.tick()
    assert list(fleet.core.lanes) == ["b"]
    assert reports(fleet)[-1].state is DrainState.DONE


def test_a_drain_of_the_service_refuses_requests_and_ends_with_the_last_one() -> None:
    fleet = at_work([False], 3)
    effects = drain(fleet, "")
    assert fx.AnnounceDrain(frontend=FRONTEND) in effects
    assert fleet.core.is_stop_wanted
    stream = fleet.submit([9], max_new_tokens=1)
    assert any(isinstance(one, fx.Rejected) and one.stream == stream for one in fleet.effects)
    fleet.step(0.01)
    assert reports(fleet)[-1].running == 3
    fleet.run()
    assert reports(fleet)[-1].state is DrainState.DONE


def test_a_drain_of_the_service_reports_requests_that_its_time_ended() -> None:
    fleet = at_work([False], 3)
    streams = list(fleet.streams)
    drain(fleet, "", max_seconds=1.0)
    assert fleet.core.stop_at == pytest.approx(fleet.now + 1.0)
    fleet.handle(ev.DrainEnded())
    assert [fleet.failure(stream).code for stream in streams] == [fx.FailureCode.SHUTDOWN] * 3
    fleet.check_empty()
    fleet.tick()
    assert reports(fleet)[-1].state is DrainState.TIME_LIMIT and "3 requests" in reports(fleet)[-1].detail


def test_what_no_other_worker_takes_goes_on_for_a_moment_and_then_waits_for_one() -> None:
    fleet = at_work([False], 2, tokens=90)
    at = fleet.now
    fleet.handle(STOPS)
    ask(fleet, 1)
    while not dismissed(fleet):
        assert len(fleet.running("a")) == 2
        fleet.handle(ev.Tick())
        fleet.now += 0.25
    assert fleet.now == at + STAY_SECONDS + 0.25
    assert "a" not in fleet.core.lanes and fleet.core.queue.num_waiting == 3
    fleet.join_as(ROOMY)
    fleet.finish()
    assert fleet.told(fx.Note) == []


@pytest.mark.parametrize("worker_is_first", [True, False])
def test_a_worker_stays_while_the_service_stops_whoever_was_asked_first(worker_is_first: bool) -> None:
    """Also for a request that has no row yet, and an idle worker beside one with rows."""
    fleet = at_work([False], 9, tokens=40)
    assert fleet.core.queue.num_waiting == 1
    for event in (STOPS, ev.DrainStarted()) if worker_is_first else (ev.DrainStarted(), STOPS):
        fleet.handle(event)
    fleet.steps(20, STAY_SECONDS / 10)
    fleet.finish()
    assert dismissed(fleet) == []
