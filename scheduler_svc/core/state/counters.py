"""Counters of the core since its start, and the reports of steps, lane resets and joins that are made from them.

The plan builder and the lanes count. Reports are made only if the config asks for them; that of a step is made when its
result is read, before the requests that it ends leave their rows.
"""

from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause, StepKind, StepReport
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.memory_limit import Reduction

_RECENT_STEPS = 64


class Counters:
    """All counters start at zero and only increase; and the times of the last steps."""

    def __init__(self) -> None:
        self.steps = 0
        """Confirmed steps."""
        self.preemptions = 0
        self.resets_by_cause = dict.fromkeys(ResetCause, 0)
        """Lane resets. The loss of a worker counts as one."""
        self.hung_workers = 0
        """Workers that were given up because a step took too long or because they were silent."""
        self.memory_reductions = dict.fromkeys(Reduction, 0)
        """How often a step that ran out of memory led to each reduction."""
        self.prompt_tokens = 0
        """Prompt tokens of all requests that have had a row."""
        self.cached_prompt_tokens = 0
        """Number of `prompt_tokens` that were found in the prefix cache."""
        self.output_tokens = 0
        """Tokens that steps have emitted."""
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step_confirmed(self, seconds: float, output_tokens: int) -> None:
        """Counts a confirmed step, whose result was read `seconds` after its plan was sent."""
        self.steps += 1
        self.output_tokens += output_tokens
        self._step_seconds.append(seconds)

    @property
    def step_ms(self) -> float:
        """Median time of the last steps from sending the plan to reading the result, in ms; 0 before the first."""
        return 1e3 * median(self._step_seconds) if self._step_seconds else 0.0

    @property
    def resets(self) -> int:
        """Number of lane resets."""
        return sum(self.resets_by_cause.values())

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a request that got its first row. `cached_tokens` of its prompt were in the prefix cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached_tokens


def step_report(
    counters: Counters,
    waiting: int,
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
        step=counters.steps,
        lane=lane.number,
        generation=lane.generation,
        running=lane.rows.num_seated,
        waiting=waiting,
        prefill_tokens=prefill,
        decode_tokens=decode,
        output_tokens=output_tokens,
        pages_used=lane.pool.num_used,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        preemptions=counters.preemptions,
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
