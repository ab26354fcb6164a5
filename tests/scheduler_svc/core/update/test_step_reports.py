"""The core's step reports: their exact values if the config asks for reports, and none otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS
from scheduler_svc.core.messages.reports import ResetCause, StepKind, StepReport
from tests.rigs.core_events import step_done
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=11, max_rows=3, token_budget=8, chunk_align=4)


def world(shape: Shape = SHAPE, **config: float) -> World:
    return World(shape, greedy(report_steps=True, **config))  # type: ignore[arg-type]


def reports(world: World) -> list[StepReport]:
    return world.told(StepReport)


def report(kind: StepKind, **fields: Any) -> StepReport:
    """The report of the only lane, with these fields and no other event."""
    plain: dict[str, Any] = {
        "cause": None, "at": 0.0, "step": 0, "lane": 1, "generation": 1, "running": 0, "waiting": 0,
        "prefill_tokens": 0, "decode_tokens": 0, "output_tokens": 0, "pages_used": 0, "pages_cached": 0,
        "pages_total": 10, "preemptions": 0, "compute_us": 0, "span_seconds": 0.0, "workers": 1,
    } | fields  # fmt: skip
    of_all = {f"all_{name}": plain[name] for name in ("running", "pages_used", "pages_cached", "pages_total")}
    return StepReport(kind=kind, **(of_all | plain))


def prompt(length: int) -> list[int]:
    return [10 + i for i in range(length)]


def finish(world: World, compute_us: int) -> None:
    """Executes the worker's oldest plan in `compute_us` and gives the result to the core."""
    assert world.apply()
    world.results[0].compute_us = compute_us
    world.deliver()


def test_nothing_is_reported_by_default() -> None:
    silent = World(SHAPE)
    silent.submit(prompt(3))
    silent.run()
    silent.restart()
    assert reports(silent) == []


def test_each_step_is_reported() -> None:
    at = world(plans_in_flight=1)
    at.submit(prompt(7), max_new_tokens=3, ignore_eos=True)
    at.tick(1.0)
    at.submit(prompt(2), max_new_tokens=2, ignore_eos=True)
    at.now = 1.25
    finish(at, 1500)
    at.tick(0.25)
    at.now = 2.0
    finish(at, 250)
    at.tick()
    finish(at, 125)
    joined, *steps = reports(at)
    assert joined == report(StepKind.JOINED)
    # One prompt while the other waits. Then the first request decodes beside the second's prompt, on its own page.
    assert steps == [
        report(StepKind.PREFILL, at=1.25, step=1, running=1, waiting=1, prefill_tokens=7, output_tokens=1,
               pages_used=2, compute_us=1500, span_seconds=0.25),
        report(StepKind.MIXED, at=2.0, step=2, running=2, prefill_tokens=2, decode_tokens=1, output_tokens=2,
               pages_used=3, compute_us=250, span_seconds=0.5),
        # Both requests end with this step and count as running in it.
        report(StepKind.DECODE, at=2.0, step=3, running=2, decode_tokens=2, output_tokens=2, pages_used=4,
               compute_us=125),
    ]  # fmt: skip
    at.check_all_ended()


def test_the_report_of_a_lost_worker_counts_the_tokens_of_its_lost_plans() -> None:
    at = world()
    at.submit(prompt(7), max_new_tokens=4, ignore_eos=True)
    at.tick(1.0)
    at.now = 1.5
    at.kill()
    at.now = 4.0
    at.join()
    _, reset, joined = reports(at)
    assert reset == report(
        StepKind.RESET, cause=ResetCause.WORKER_LOST, at=1.5, generation=2, waiting=1, prefill_tokens=7,
        decode_tokens=1, span_seconds=0.5, workers=0, all_pages_total=0,
    )  # fmt: skip
    assert (joined.kind, joined.at, joined.generation, joined.waiting) == (StepKind.JOINED, 4.0, 3, 1)
    at.run()
    steps = reports(at)[3:]
    assert [report.step for report in steps] == [1, 2, 3, 4]
    at.check_all_ended()


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (ev.StepStatus.FAILED, ResetCause.STEP_FAILED),
        (ev.StepStatus.OUT_OF_MEMORY, ResetCause.OUT_OF_MEMORY),
        (ev.StepStatus.OUT_OF_SYNC, ResetCause.OUT_OF_SYNC),
        (ev.StepStatus.SKIPPED, ResetCause.SKIPPED),
    ],
)
def test_a_failed_step_reports_its_status_as_the_cause(status: ev.StepStatus, cause: ResetCause) -> None:
    at = world()
    at.submit(prompt(3), max_new_tokens=4, ignore_eos=True)
    at.tick(1.0)
    _answer(at, status=status, compute_us=77)
    reset = reports(at)[-1]
    assert (reset.kind, reset.cause, reset.compute_us, reset.waiting) == (StepKind.RESET, cause, 77, 1)


def _answer(at: World, **fields: object) -> None:
    at.handle(step_done(at.worker, at.sent[-2], NO_IDS, **fields))


def test_results_that_match_no_plan_report_their_cause() -> None:
    at = world()
    at.submit(prompt(3), max_new_tokens=4, ignore_eos=True)
    at.tick()
    _answer(at, step=9)
    assert reports(at)[-1].cause is ResetCause.WRONG_STEP
    at.tick()
    _answer(at)
    assert reports(at)[-1].cause is ResetCause.MALFORMED


def test_the_report_of_a_silent_worker_names_the_silence() -> None:
    at = world(step_timeout_seconds=3.0)
    at.submit(prompt(3), ignore_eos=True)
    at.tick()
    at.tick(3.0)
    assert (reports(at)[-1].cause, reports(at)[-1].span_seconds) == (ResetCause.WORKER_SILENT, 3.0)


def test_step_reports_add_up_to_the_load() -> None:
    shape = Shape(page_size=2, num_pages=14, max_rows=4, token_budget=12, chunk_align=2)
    at = world(shape)
    for length in (3, 9, 1, 6, 4):
        at.submit(prompt(length), max_new_tokens=9, ignore_eos=True)
    at.run()
    at.kill()
    at.join(Faults())
    at.submit(prompt(5), max_new_tokens=3, ignore_eos=True)
    at.run()
    at.handle(ev.LoadQuery(frontend="f-1", query=1))
    load = next(effect.load for effect in at.effects if isinstance(effect, fx.LoadReply))
    steps = [report for report in reports(at) if report.kind not in (StepKind.RESET, StepKind.JOINED)]
    assert [report.step for report in steps] == list(range(1, load.steps + 1))
    assert (
        sum(report.output_tokens for report in steps)
        == load.output_tokens
        == sum(len(stream.tokens) for stream in at.streams.values())
    )
    assert steps[-1].preemptions == load.preemptions > 0
    assert sum(report.kind is StepKind.RESET for report in reports(at)) == load.lane_resets == 1
    at.check_all_ended()


def test_totals_are_sums_over_the_lanes_that_remain() -> None:
    fleet = Fleet(SHAPE, replace(SHAPE, num_pages=21), config=greedy(report_steps=True, plans_in_flight=1))
    fleet.submit(prompt(7), max_new_tokens=9, ignore_eos=True)
    fleet.submit(prompt(3)[::-1], max_new_tokens=9, ignore_eos=True)
    fleet.steps(2)
    fleet.lose("b")
    fleet.run()
    seven = reports(fleet)[:7]
    totals = [(one.workers, one.all_running, one.all_pages_used, one.all_pages_total) for one in seven]
    # The second worker's request takes one page, the first worker's two.
    assert totals == [(1, 0, 0, 10), (2, 0, 0, 30), *[(2, 2, 3, 30)] * 4, (1, 1, 2, 10)]
    steps, loss = seven[2:6], seven[6]
    assert [(one.lane, one.running, one.pages_total) for one in steps] == [(1, 1, 10), (2, 1, 20)] * 2
    assert (loss.lane, loss.kind, loss.pages_total) == (2, StepKind.RESET, 20)
    assert all(one.all_running == one.running for one in reports(fleet)[7:])
