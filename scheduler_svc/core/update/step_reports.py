"""Builds the StepReport of a step, a lane reset or a join. The core makes reports only if its config asks for them.

A step's report is built when its result is read, before the requests that it ends leave their rows.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause, StepKind, StepReport
from scheduler_svc.core.state.lane import Lane


class Totals(NamedTuple):
    """Steps (this one included) and preemptions since the core's start, and the requests that wait now."""

    steps: int
    preemptions: int
    waiting: int


def step_report(
    totals: Totals,
    lanes: Collection[Lane],
    lane: Lane,
    now: float,
    plans: Sequence[SentPlan],
    cause: ResetCause | None,
    output_tokens: int,
    compute_us: int,
) -> StepReport:
    """Returns the report of one event of `lane`. `lanes` are all that are seated, without one that the event closed.

    `plans` holds the plan of a confirmed step, or the plans that a reset made void, oldest first. A reset has a
    `cause`. A join has neither.
    """
    prefill = sum(plan.prefill_tokens for plan in plans)
    decode = sum(plan.decode_tokens for plan in plans)
    return StepReport(
        kind=_kind(cause, plans, prefill, decode),
        cause=cause,
        at=now,
        step=totals.steps,
        lane=lane.number,
        generation=lane.generation,
        running=lane.rows.num_seated,
        waiting=totals.waiting,
        prefill_tokens=prefill,
        decode_tokens=decode,
        output_tokens=output_tokens,
        pages_used=lane.pool.num_used,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        preemptions=totals.preemptions,
        compute_us=compute_us,
        span_seconds=now - plans[0].sent_at if plans else 0.0,
        workers=len(lanes),
        all_running=sum(each.rows.num_seated for each in lanes),
        all_pages_used=sum(each.pool.num_used for each in lanes),
        all_pages_cached=sum(each.pool.num_evictable for each in lanes),
        all_pages_total=sum(each.info.usable_pages for each in lanes),
    )


def _kind(cause: ResetCause | None, plans: Sequence[SentPlan], prefill: int, decode: int) -> StepKind:
    if cause is not None:
        return StepKind.RESET
    if not plans:
        return StepKind.JOINED
    if prefill and decode:
        return StepKind.MIXED
    return StepKind.PREFILL if prefill else StepKind.DECODE
