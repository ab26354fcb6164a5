"""What the core's process measures: the steps of the real core, the places of its workers, turns, and its counts."""

import time
from dataclasses import replace

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.metrics.page import Page
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import greedy

SHAPE = Shape(page_size=4, num_pages=24, max_rows=8, token_budget=16)


class MeasuredFleet(Fleet):
    """Measures each event as the shell does."""

    def __init__(self, *shapes: Shape) -> None:
        self.meter = CoreMeter(clock=lambda: self.now)
        super().__init__(*shapes, config=greedy(report_steps=True))

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        if isinstance(event, ev.StepDone):
            self.meter.step_arrived(event, self.core)
        return super().handle(event)

    def reports(self) -> list[fx.StepReport]:
        """The core's own reports of confirmed steps."""
        return [one for one in self.effects if isinstance(one, fx.StepReport) and one.kind in catalogue.STEP_KINDS]

    def ask(self, count: int) -> None:
        for first in range(count):
            self.submit([first, *range(9)], max_new_tokens=12, ignore_eos=True)


def test_the_steps_are_those_that_the_core_confirms() -> None:
    fleet = MeasuredFleet(SHAPE, SHAPE)
    fleet.ask(12)
    fleet.steps(5, 0.001)
    fleet.lose("a")
    fleet.join_as(SHAPE, Faults(fail_steps=frozenset({3})))
    fleet.run()
    fleet.check_all_ended()
    reports, meter = fleet.reports(), fleet.meter
    assert len(reports) == fleet.core.counters.steps > 20
    positions = [one.prefill_tokens + one.decode_tokens for one in reports]
    tokens, spans = (meter.histograms[metric] for metric in (catalogue.STEP_TOKENS, catalogue.PLAN_TO_RESULT))
    assert (sum(tokens.counts), tokens.sum) == (len(positions), sum(positions))
    assert sum(spans.counts) == len(reports)
    kinds = [one.kind for one in reports]
    assert [
        sum(sum(of_place[idx].counts) for of_place in meter.steps.values()) for idx in range(len(catalogue.STEP_KINDS))
    ] == [kinds.count(kind) for kind in catalogue.STEP_KINDS]
    assert abs(sum(one.span_seconds for one in reports) - spans.sum) < 1e-9


def places(fleet: MeasuredFleet) -> list[str]:
    return [place for (place,), _ in fleet.meter.last_look[catalogue.KV_USAGE]]


def looked(fleet: MeasuredFleet, *metrics: catalogue.Metric) -> tuple[float, ...]:
    """The numbers of the last look at metrics without labels."""
    return tuple(number for metric in metrics for _, number in fleet.meter.last_look[metric])


def test_a_new_worker_takes_the_place_of_the_one_that_left() -> None:
    fleet = MeasuredFleet(SHAPE, SHAPE)
    fleet.ask(8)
    fleet.steps(4, 0.001)
    fleet.meter.turned(fleet.core, 0.0)
    assert places(fleet) == ["0", "1"]
    fleet.lose("a")
    fleet.join_as(SHAPE)
    fleet.meter.turned(fleet.core, 1.0)
    assert sorted(places(fleet)) == ["0", "1"]
    for _ in range(100):
        fleet.lose(next(iter(fleet.workers)))
        fleet.plans_of = {name: [] for name in fleet.workers}
        fleet.join_as(SHAPE)
        fleet.steps(3, 0.001)
    assert sorted(fleet.meter.steps) == [0, 1]


def test_a_look_has_the_core_s_own_numbers() -> None:
    fleet = MeasuredFleet(SHAPE)
    fleet.join_as(SHAPE, is_standby=True)
    fleet.ask(12)
    fleet.steps(6, 0.001)
    fleet.meter.turned(fleet.core, 5.0)
    look, core = fleet.meter.last_look, fleet.core
    lane = fleet.lane_of("a")
    assert looked(fleet, catalogue.WORKERS, catalogue.STANDBY_WORKERS, catalogue.FRONTENDS) == (1, 1, 1)
    running, waiting = looked(fleet, catalogue.RUNNING, catalogue.WAITING)
    assert (running, waiting) == (lane.rows.num_seated, core.queue.num_waiting)
    assert running and waiting
    assert look[catalogue.KV_USAGE] == [(("0",), lane.pool.num_used / lane.info.usable_pages)]
    # The next look is due a second later.
    fleet.run()
    fleet.meter.turned(core, 5.9)
    assert fleet.meter.last_look is look
    fleet.meter.turned(core, 6.0)
    counted = (catalogue.RUNNING, catalogue.WAITING, catalogue.PREEMPTIONS)
    assert looked(fleet, *counted) == (0, 0, core.counters.preemptions)
    of_cache = (core.counters.prompt_tokens, core.counters.cached_prompt_tokens)
    assert looked(fleet, catalogue.CACHE_QUERIES, catalogue.CACHE_HITS) == of_cache


def test_the_page_has_the_reason_and_the_time_for_which_nothing_is_computed() -> None:
    fleet = MeasuredFleet(SHAPE)
    fleet.step(0.001)
    fleet.meter.turned(fleet.core, 1.0)
    assert not any(looked(fleet, catalogue.NOT_SERVING)) and looked(fleet, catalogue.NOT_SERVING_SINCE) == (0.0,)
    fleet.lose("a")
    fleet.tick(5.0)
    before = time.time()
    for turn in range(2, 4):
        fleet.meter.turned(fleet.core, float(turn))
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in Page(fleet.meter, list).collect()
            for sample in family.samples
        }
        lost = [reason for name, *reason in samples if name == "tandem_not_serving" and samples[(name, *reason)]]
        assert lost == [["worker_lost"]]
        since = samples[("tandem_not_serving_since_seconds",)]
        assert before - 1.0 <= since <= time.time() and samples[("tandem_workers",)] == 0
    # The series does not move while the reason holds.
    assert looked(fleet, catalogue.NOT_SERVING_SINCE) == (since,)


def test_preemptions_are_those_of_the_requests() -> None:
    fleet = MeasuredFleet(SHAPE, SHAPE)
    fleet.ask(16)
    fleet.steps(10, 0.001)
    fleet.lose("a")
    fleet.run()
    ends = [end for effect in fleet.effects if isinstance(effect, fx.StepOutput) for end in effect.ends]
    assert len(ends) == 16
    assert sum(end.stats.preemptions for end in ends) == fleet.core.counters.preemptions > 0


def test_resets_have_causes() -> None:
    fleet = MeasuredFleet(SHAPE, SHAPE)
    fleet.ask(4)
    fleet.steps(3, 0.001)
    fleet.lose("a")
    fleet.join_as(SHAPE, Faults(fail_steps=frozenset({2})))
    fleet.ask(4)
    fleet.run()
    fleet.meter.turned(fleet.core, 9.0)
    causes = {cause: number for (cause,), number in fleet.meter.last_look[catalogue.RESETS]}
    assert causes["worker_lost"] == 1 and causes["step_failed"] == 1
    assert sum(causes.values()) == fleet.core.counters.resets
    assert fleet.core.counters.resets_by_cause[ResetCause.WORKER_LOST] == 1


def test_a_turn_counts_if_it_read_a_step() -> None:
    fleet = MeasuredFleet(SHAPE)
    fleet.meter.turned(fleet.core, fleet.now)
    turns = fleet.meter.histograms[catalogue.CORE_STEP]
    assert sum(turns.counts) == 0
    fleet.ask(1)
    fleet.step()
    began, fleet.now = fleet.now, fleet.now + 0.003
    fleet.meter.turned(fleet.core, began)
    fleet.meter.turned(fleet.core, began)
    assert sum(turns.counts) == 1 and abs(turns.sum - 0.003) < 1e-9


def test_results_of_void_plans_and_unknown_workers_do_not_count() -> None:
    fleet = MeasuredFleet(SHAPE)
    fleet.ask(1)
    fleet.tick()
    fleet.apply_plans("a")
    worker = fleet.workers["a"]
    event = worker.event_of(worker.results.popleft())
    assert isinstance(event, ev.StepDone)
    for void in (
        replace(event, generation=event.generation - 1),
        replace(event, step=event.step + 1),
        replace(event, worker="unknown"),
        replace(event, status=ev.StepStatus.FAILED),
    ):
        fleet.meter.step_arrived(void, fleet.core)
    assert sum(fleet.meter.histograms[catalogue.STEP_TOKENS].counts) == 0
    fleet.meter.step_arrived(event, fleet.core)
    assert sum(fleet.meter.histograms[catalogue.STEP_TOKENS].counts) == 1
