"""Drains and updates of weights under one table of rules: which front end watches, which gets a report, and when."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights
from scheduler_svc.core.messages.reports import DrainReport, DrainState, UpdateState, WeightsReport
from scheduler_svc.core.operations.operation import MAX_WATCHERS, REPORT_SECONDS
from scheduler_svc.core.operations.weights import RETRY_SECONDS
from tests.scheduler_svc.core.updated import ROOT, UpdatedFleet
from tests.scheduler_svc.core.world import FRONTEND

OTHER = "f-2"
STEP = 0.125
"""A step of the worker: eight for each report. Powers of two, so that sums of times are exact."""
WEIGHTS = Weights(version="v1", folder=f"{ROOT}/v1")


class WatchedFleet(UpdatedFleet):
    """A worker with one long request, two front ends, and every report as (time, front end, query, report)."""

    def __init__(self, *, num_workers: int = 1, tokens: int = 100) -> None:
        self.heard: list[tuple[float, str, int, Any]] = []
        self.refused: list[Any] = []
        self.news: list[fx.Effect] = []
        super().__init__(num_workers=num_workers)
        self.handle(ev.FrontendJoined(frontend=OTHER))
        while self.core.info is None:
            self.advance()
        self.stream = self.ask([1, 2, 3], max_new_tokens=tokens)
        self.advance()

    def _take(self, effect: fx.Effect) -> None:
        super()._take(effect)
        match effect:
            case DrainReport() | WeightsReport():
                self.heard.append((self.now, effect.frontend, effect.query, effect))
            case fx.DrainRefused() | fx.UpdateRefused():
                self.refused.append(effect)
            case fx.DismissWorker():
                self.news.append(effect)
            case _:
                pass

    def advance(self, steps: int = 1, *, works: bool = True) -> None:
        """Each step ticks; then the worker has one message, unless it does not work, and is alive."""
        for _ in range(steps):
            self.tick(STEP)
            for name in list(self.workers):
                if works:
                    self.turn(name)
                self.handle(ev.WorkerAlive(worker=name))

    def to(self, frontend: str, query: int) -> list[float]:
        """The times of the reports to one operator."""
        return [at for at, *whom, _ in self.heard if whom == [frontend, query]]

    def leave(self) -> None:
        """Workers end if the core has asked them to."""
        for each in self.news:
            assert isinstance(each, fx.DismissWorker)
            del self.workers[each.worker]
            self.handle(ev.WorkerLost(worker=each.worker, reason="it stops", is_orderly=True))
        self.news.clear()

    def finish(self) -> None:
        """The request ends, and what waited for it too."""
        while self.stream.end is None:
            self.advance()
        for _ in range(6):
            self.advance()
            self.leave()


@pytest.fixture
def fleet() -> WatchedFleet:
    return WatchedFleet()


def drain(frontend: str, query: int, *, max_seconds: float = 0.0, stop_replies: bool = False) -> ev.Event:
    # As the wire has them, the other fields are empty when replies are not wanted any more.
    worker = "" if stop_replies else "a"
    return ev.Drain(
        frontend=frontend, query=query, worker=worker, max_seconds=max_seconds, force=True, stop_replies=stop_replies
    )


def update(frontend: str, query: int, *, max_seconds: float = 0.0, stop_replies: bool = False) -> ev.Event:
    return UpdateWeights(
        frontend=frontend,
        query=query,
        weights=Weights(version="", folder="") if stop_replies else WEIGHTS,
        running=Running.FINISH,
        max_seconds=max_seconds or 600.0,
        stop_replies=stop_replies,
    )


@dataclass(frozen=True, kw_only=True)
class Kind:
    ask: Callable[..., ev.Event]
    states: tuple[Any, ...]
    """At the beginning, and as an operator sees them when the request has ended."""
    full: str
    refused: type[Any]


KINDS = {
    "drain": Kind(
        ask=drain,
        states=(DrainState.DRAINING, DrainState.LEAVING, DrainState.DONE),
        full="64 callers watch drains; this is the limit",
        refused=fx.DrainRefused,
    ),
    "update": Kind(
        ask=update,
        states=(UpdateState.UPDATING, UpdateState.DONE),
        full="64 callers watch the update of weights; this is the limit",
        refused=fx.UpdateRefused,
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
def test_the_next_tick_answers_and_then_reports_come_once_a_second(fleet: WatchedFleet, kind: Kind) -> None:
    fleet.handle(kind.ask(FRONTEND, 7))
    assert fleet.heard == []
    began = fleet.now
    fleet.advance(int(3.5 * REPORT_SECONDS / STEP))
    first = began + STEP
    assert fleet.to(FRONTEND, 7) == [first + n * REPORT_SECONDS for n in range(4)]
    assert [(one.state, one.seconds, one.running, one.waiting) for *_, one in fleet.heard] == [
        (kind.states[0], STEP + n * REPORT_SECONDS, 1, 0) for n in range(4)
    ]
    assert fleet.refused == []


@each_kind
def test_each_change_is_told_at_once_and_the_end_is_the_last_report(fleet: WatchedFleet, kind: Kind) -> None:
    fleet.handle(kind.ask(FRONTEND, 7))
    fleet.handle(kind.ask(OTHER, 7))
    fleet.finish()
    states = [one.state for _, frontend, _, one in fleet.heard if frontend == FRONTEND]
    assert list(dict.fromkeys(states)) == list(kind.states)
    assert fleet.to(FRONTEND, 7) == fleet.to(OTHER, 7)
    # Some report came before its second was over.
    times = fleet.to(FRONTEND, 7)
    assert times[-1] - times[-2] < REPORT_SECONDS
    count = len(fleet.heard)
    fleet.advance(3 * int(REPORT_SECONDS / STEP))
    assert len(fleet.heard) == count
    # Nothing but the workers' signs of life is due.
    wake = fleet.core.next_wake()
    assert wake is None or wake > fleet.now + 2 * REPORT_SECONDS


@each_kind
def test_who_asks_for_the_same_again_watches_it_and_is_answered_by_the_next_tick(kind: Kind) -> None:
    fleet = WatchedFleet()
    fleet.handle(kind.ask(FRONTEND, 1))
    fleet.advance(3)
    fleet.handle(kind.ask(OTHER, 2))
    fleet.advance(6)
    assert fleet.refused == []
    begun = fleet.to(FRONTEND, 1)[0]
    assert fleet.to(FRONTEND, 1) == [begun, begun + REPORT_SECONDS]
    assert fleet.to(OTHER, 2) == [begun + 3 * STEP, begun + REPORT_SECONDS]
    assert {one.seconds for at, *_, one in fleet.heard if at == begun + REPORT_SECONDS} == {STEP + REPORT_SECONDS}


@each_kind
def test_it_goes_on_without_the_front_end_and_another_operator_may_watch_it(fleet: WatchedFleet, kind: Kind) -> None:
    fleet.handle(kind.ask(OTHER, 1))
    fleet.advance(2)
    fleet.handle(ev.FrontendLost(frontend=OTHER))
    fleet.advance(2 * int(REPORT_SECONDS / STEP))
    assert len(fleet.to(OTHER, 1)) == 1
    fleet.handle(kind.ask(FRONTEND, 1))
    fleet.finish()
    assert fleet.refused == [] and len(fleet.to(OTHER, 1)) == 1
    assert fleet.heard[-1][-1].state is kind.states[-1]


@each_kind
def test_it_goes_on_without_its_operator_who_may_come_back(fleet: WatchedFleet, kind: Kind) -> None:
    fleet.handle(kind.ask(FRONTEND, 1))
    fleet.handle(kind.ask(OTHER, 1))
    fleet.advance(1)
    fleet.handle(kind.ask(FRONTEND, 1, stop_replies=True))
    fleet.advance(2 * int(REPORT_SECONDS / STEP))
    assert len(fleet.to(FRONTEND, 1)) == 1 and len(fleet.to(OTHER, 1)) == 3
    assert not fleet.core.is_stopping
    fleet.handle(kind.ask(FRONTEND, 2))
    fleet.finish()
    assert fleet.refused == [] and len(fleet.to(FRONTEND, 1)) == 1
    assert [one.state for _, frontend, query, one in fleet.heard if (frontend, query) == (FRONTEND, 2)][-1] is (
        kind.states[-1]
    )


@each_kind
def test_the_number_of_watchers_is_bounded(fleet: WatchedFleet, kind: Kind) -> None:
    for query in range(MAX_WATCHERS):
        fleet.handle(kind.ask(OTHER if query % 2 else FRONTEND, query))
    fleet.handle(kind.ask(FRONTEND, MAX_WATCHERS))
    [refused] = fleet.refused
    assert isinstance(refused, kind.refused)
    assert (refused.frontend, refused.query, refused.code) == (FRONTEND, MAX_WATCHERS, fx.RejectCode.QUEUE_FULL)
    assert refused.message == kind.full
    # One place is free again when an operator leaves, and all places of a front end when it is lost.
    fleet.handle(kind.ask(FRONTEND, 0, stop_replies=True))
    fleet.handle(kind.ask(FRONTEND, MAX_WATCHERS))
    fleet.handle(ev.FrontendLost(frontend=OTHER))
    fleet.advance()
    for query in range(MAX_WATCHERS // 2):
        fleet.handle(kind.ask(FRONTEND, 1000 + query))
    assert len(fleet.refused) == 1
    fleet.handle(kind.ask(FRONTEND, 2000))
    assert len(fleet.refused) == 2
    fleet.advance()
    assert len({query for _, frontend, query, _ in fleet.heard if frontend == FRONTEND}) == MAX_WATCHERS


@each_kind
@pytest.mark.parametrize("times", [(10.0, 3.0), (3.0, 10.0), (3.0, 0.0), (0.0, 3.0)])
def test_the_earliest_of_the_times_ends_it(fleet: WatchedFleet, kind: Kind, times: tuple[float, float]) -> None:
    for query, seconds in enumerate(times):
        fleet.handle(kind.ask(FRONTEND, query, max_seconds=seconds))
    began = fleet.now
    fleet.advance(int(4.0 / STEP))
    last = [(at, query, one.state.value) for at, _, query, one in fleet.heard][-2:]
    assert last == [(began + 3.0, query, "time limit") for query in range(2)]


@each_kind
def test_the_core_wakes_for_the_next_report_and_the_end_and_not_before(fleet: WatchedFleet, kind: Kind) -> None:
    """A time that is over would make its loop run without a pause."""
    fleet.handle(kind.ask(FRONTEND, 1, max_seconds=2.5))
    began = fleet.now

    def wake() -> float:
        # Other things may be due, as the worker's next sign of life.
        at = fleet.core.next_wake()
        assert at is not None and at > fleet.now
        return at

    fleet.advance(works=False)
    assert wake() == began + STEP + REPORT_SECONDS
    fleet.handle(kind.ask(FRONTEND, 1, stop_replies=True))
    while fleet.now < began + 2.5 - STEP:
        fleet.advance(works=False)
        assert wake() == began + 2.5


def test_a_worker_that_loads_beyond_the_time_of_its_update_wakes_nobody() -> None:
    fleet = WatchedFleet(tokens=1)
    fleet.finish()
    fleet.handle(update(FRONTEND, 1, max_seconds=0.25))
    assert fleet.run_until_loading() == "a"
    for _ in range(16):
        fleet.advance(works=False)
        wake = fleet.core.next_wake()
        assert wake is not None and wake > fleet.now
    fleet.finish()
    assert fleet.heard[-1][-1].state is UpdateState.DONE


def test_a_worker_that_cannot_load_and_has_requests_wakes_nobody_when_it_is_to_be_asked_again() -> None:
    fleet = WatchedFleet(num_workers=2, tokens=1)
    fleet.finish()
    fleet.workers["b"].refusal = "no space"
    fleet.handle(update(FRONTEND, 1))
    fleet.finish()
    assert fleet.heard[-1][-1].state is UpdateState.INCOMPLETE
    fleet.lose("a")
    fleet.stream = fleet.ask([1, 2, 3], max_new_tokens=80)
    for _ in range(int((RETRY_SECONDS + 2) / STEP)):
        fleet.advance()
        wake = fleet.core.next_wake()
        assert wake is not None and wake > fleet.now
    assert fleet.stream.end is None and [each.worker for each in fleet.told(fx.LoadWeights)].count("b") == 1


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_drain_is_watched_while_an_update_goes_on(in_turn: bool) -> None:
    """Both by one front end, with the same number of their queries: the core keeps them apart."""
    fleet = WatchedFleet(num_workers=2, tokens=60)
    event = UpdateWeights(frontend=FRONTEND, query=1, weights=WEIGHTS, running=Running.FINISH, in_turn=in_turn)
    fleet.handle(event)
    fleet.handle(drain(FRONTEND, 1))
    fleet.handle(drain(OTHER, 1))
    fleet.advance()
    assert [(frontend, query, type(one)) for _, frontend, query, one in fleet.heard] == [
        (FRONTEND, 1, DrainReport),
        (OTHER, 1, DrainReport),
        (FRONTEND, 1, WeightsReport),
    ]
    fleet.handle(ev.FrontendLost(frontend=OTHER))
    fleet.handle(update(FRONTEND, 1, stop_replies=True))
    fleet.handle(UpdateWeights(frontend=FRONTEND, query=2, weights=WEIGHTS, running=Running.FINISH, in_turn=in_turn))
    fleet.finish()
    fleet.advance(4)
    last = {(query, type(one)): one.state for _, frontend, query, one in fleet.heard if frontend == FRONTEND}
    assert last == {
        (1, DrainReport): DrainState.DONE,
        (1, WeightsReport): UpdateState.UPDATING,
        (2, WeightsReport): UpdateState.DONE,
    }
    assert fleet.versions() == {"b": "v1"} and len(fleet.to(OTHER, 1)) == 1
    fleet.check(fleet.stream)


@pytest.mark.parametrize(
    "changes",
    [
        {"running": Running.RECOMPUTE},
        {"in_turn": True},
        {"weights": Weights(version="v2", folder=WEIGHTS.folder)},
        {"weights": Weights(version="v1", folder=f"{ROOT}/other")},
    ],
)
def test_who_asks_for_another_update_does_not_watch_this_one(fleet: WatchedFleet, changes: dict[str, Any]) -> None:
    fleet.handle(update(FRONTEND, 1))
    asked: dict[str, Any] = {"weights": WEIGHTS, "running": Running.FINISH} | changes
    fleet.handle(UpdateWeights(frontend=OTHER, query=2, **asked))
    assert [(each.code, each.query) for each in fleet.refused] == [(fx.RejectCode.DUPLICATE, 2)]
    fleet.advance(10)
    assert fleet.to(OTHER, 2) == []
