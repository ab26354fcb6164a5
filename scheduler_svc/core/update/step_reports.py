"""Says what became of each step, for whoever watches steps; says nothing unless the config asks for it.

Owns nothing: it reads the lane and the queue as they are when a result is read, before those whom the step ends leave.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause, StepKind, StepReport
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request_queue import RequestQueue


class Totals(NamedTuple):
    """Counted since the core's start, this step included."""

    steps: int
    preemptions: int


def confirmed(
    totals: Totals,
    lane: Lane,
    queue: RequestQueue,
    now: float,
    record: SentPlan,
    output_tokens: int,
    compute_us: int,
) -> StepReport:
    """A step that went well."""
    prefill, decode = record.prefill_tokens, record.decode_tokens
    return StepReport(
        kind=StepKind.MIXED if prefill and decode else StepKind.PREFILL if prefill else StepKind.DECODE,
        cause=None,
        at=now,
        step=totals.steps,
        lane=lane.number,
        generation=lane.generation,
        running=lane.rows.num_seated,
        waiting=queue.num_waiting,
        prefill_tokens=prefill,
        decode_tokens=decode,
        output_tokens=output_tokens,
        pages_used=lane.pool.num_used,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        preemptions=totals.preemptions,
        compute_us=compute_us,
        span_seconds=now - record.sent_at,
    )


def reset(
    totals: Totals,
    lane: Lane,
    queue: RequestQueue,
    now: float,
    cause: ResetCause,
    void: Sequence[SentPlan],
    compute_us: int,
) -> StepReport:
    """A lane that was reset; `void` are the plans that were in flight, oldest first."""
    return StepReport(
        kind=StepKind.RESET,
        cause=cause,
        at=now,
        step=totals.steps,
        lane=lane.number,
        generation=lane.generation,
        running=0,
        waiting=queue.num_waiting,
        prefill_tokens=sum(record.prefill_tokens for record in void),
        decode_tokens=sum(record.decode_tokens for record in void),
        output_tokens=0,
        pages_used=0,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        preemptions=totals.preemptions,
        compute_us=compute_us,
        span_seconds=now - void[0].sent_at if void else 0.0,
    )


def joined(totals: Totals, lane: Lane, queue: RequestQueue, now: float) -> StepReport:
    """A worker that serves from now on."""
    return StepReport(
        kind=StepKind.JOINED,
        cause=None,
        at=now,
        step=totals.steps,
        lane=lane.number,
        generation=lane.generation,
        running=0,
        waiting=queue.num_waiting,
        prefill_tokens=0,
        decode_tokens=0,
        output_tokens=0,
        pages_used=0,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        preemptions=totals.preemptions,
        compute_us=0,
        span_seconds=0.0,
    )
