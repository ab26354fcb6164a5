"""Knows when a lane's worker was last heard, and how long its current step may take.

A worker computes its plans one after the other. The time of a plan begins when the plan was sent or when the result of
the plan before it arrived, whichever was later. So each of several plans in flight has its own predicted time.

**Prediction.** A prediction may be too large, but cheap steps before must not make it too small. It rests on two
assumptions about the time t(w) of a step with work w: t does not fall if w grows, and t grows at most in proportion to
w. Each confirmed step with work v therefore bounds the time of every other step: t(w) <= t(v) * max(1, w / v).
Confirmed steps are kept in classes of work, each twice as large as the one before, with a moving average of the time
for each class. Steps with and without prompt chunks have separate classes, because the price of context differs between
the two. Example: after steps of 1 row in 5 ms, a step of 256 rows is predicted at 1.28 s.
"""

import math
from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.worker_info import WorkerInfo

SHORTEST_DEADLINE_SECONDS, DEADLINE_FACTOR, DEADLINE_MARGIN_SECONDS = 2.0, 8.0, 1.0
# Costs in prompt tokens, rather too high: if a price is wrong, the first step of a class has a wrong prediction.
# Context positions that a decode row reads, and pairs of chunk and context positions.
_CONTEXT_PER_TOKEN, _PAIRS_PER_TOKEN = 256, 1024
# Tokens that a started row brings, which are only copied.
_STARTED_PER_TOKEN = 256
# A page move of a worker that measured none costs this share of computing the page; zeroing a page costs less.
_MOVE_SHARE, _ZERO_SHARE = 1 / 16, 1 / 128
# A small step costs as much as this many tokens of a full one, because it reads all weights.
_BASE_TOKENS = 256
# Used if the worker measured no time of a prompt token.
_UNKNOWN_TOKEN_SECONDS = 1e-3
_FIRST_STEP_SECONDS = 0.5
# Weight of a step in the average of its class, if it was slower or faster than the average.
_SLOWER_WEIGHT, _FASTER_WEIGHT = 1 / 4, 1 / 16


def deadline_seconds(predicted_seconds: float) -> float:
    """Returns how many seconds a step may take before its worker is given up."""
    return max(SHORTEST_DEADLINE_SECONDS, DEADLINE_FACTOR * predicted_seconds) + DEADLINE_MARGIN_SECONDS


class StepTimes:
    """What one lane knows of the times of its steps."""

    def __init__(self, info: WorkerInfo) -> None:
        self._token_seconds = 1e-6 * info.token_us
        self._reach = info.window + info.sink_tokens if info.window else 0
        """Positions that one position reads; 0 for all before it."""
        move_tokens = info.page_size * _MOVE_SHARE
        if info.page_copy_us and info.token_us:
            move_tokens = info.page_copy_us / info.token_us
        self._move_tokens = move_tokens
        # Before its first step a worker zeroes its pool.
        self._zeroing_tokens = info.num_pages * info.page_size * _ZERO_SHARE
        self._of_chunks: dict[int, float] = {}
        """Class of work (power of 2) -> average time in seconds of steps with prompt chunks."""
        self._of_decodes: dict[int, float] = {}
        """The same of steps that only decode."""

    def work(self, record: SentPlan) -> float:
        """Returns the work of a step in prompt tokens, at least 1. O(rows)."""
        num_decodes, num_chunks = record.decode_tokens, len(record.ends) - record.decode_tokens
        read = np.minimum(record.ends, self._reach) if self._reach else record.ends
        if not num_chunks:
            # Most steps only decode. A sum over all rows is not a slice, which costs as much as the sum.
            work = num_decodes + int(np.add.reduce(read)) / _CONTEXT_PER_TOKEN
        else:
            # An upper bound: every chunk reads as much as the last position of all.
            pairs = record.prefill_tokens * int(read[:num_chunks].max())
            context = int(np.add.reduce(read[num_chunks:]))
            work = record.prefill_tokens + num_decodes + pairs / _PAIRS_PER_TOKEN + context / _CONTEXT_PER_TOKEN
        if record.moved_pages or record.started_tokens:
            work += record.moved_pages * self._move_tokens + record.started_tokens / _STARTED_PER_TOKEN
        return max(1.0, work)

    def predict(self, record: SentPlan, work: float) -> float:
        """Returns the predicted time in seconds of a step with this work."""
        averages = self._averages(record) or self._of_chunks or self._of_decodes
        if not averages:
            token_seconds = self._token_seconds or _UNKNOWN_TOKEN_SECONDS
            tokens = work + _BASE_TOKENS + self._zeroing_tokens
            return max(_FIRST_STEP_SECONDS, tokens * token_seconds)
        # The worker's own measurement is a lower bound, because it was taken without context.
        return max(record.prefill_tokens * self._token_seconds, _bound(averages, work))

    def learn(self, record: SentPlan, work: float, seconds: float) -> None:
        """Takes the time of a confirmed step with this work."""
        averages, work_class = self._averages(record), _class_of(work)
        average = averages.get(work_class, seconds)
        averages[work_class] = average + (seconds - average) * (_SLOWER_WEIGHT if seconds > average else _FASTER_WEIGHT)

    def _averages(self, record: SentPlan) -> dict[int, float]:
        return self._of_chunks if record.prefill_tokens else self._of_decodes


def _bound(averages: dict[int, float], work: float) -> float:
    """Returns the average of the work's class, or else the bound that the next class on either side gives."""
    level = _class_of(work)
    if level in averages:
        return averages[level]
    larger, smaller = [key for key in averages if key > level], [key for key in averages if key < level]
    bounds = [averages[min(larger)]] if larger else []
    if smaller:
        bounds.append(averages[max(smaller)] * work / 2.0 ** max(smaller))
    return min(bounds)


def _class_of(work: float) -> int:
    """Returns c with 2^c <= work < 2^(c+1), for work of at least 1."""
    return math.frexp(work)[1] - 1


class StepClock:
    """The times of one lane, on the clock of `Scheduler.handle`."""

    def __init__(self, info: WorkerInfo, now: float) -> None:
        self.heard_at = now
        """Time of the worker's last message."""
        self._result_at = now
        self._times = StepTimes(info)
        # Time in which the scheduler did not run since the current step began.
        self._paused_seconds = 0.0
        self._last_step_seconds = 0.0
        # Until then the worker may compute void plans.
        self._void_until = 0.0
        # The oldest plan in flight, its work and its predicted time, once they are needed.
        self._oldest: SentPlan | None = None
        self._work = self._prediction = 0.0

    def heard(self, now: float) -> None:
        """Records that the worker sent a message."""
        self.heard_at = now

    def answered(self, now: float, in_flight: Sequence[SentPlan]) -> None:
        """Records that the worker sent a result. `in_flight` are the plans without one, the oldest first."""
        if in_flight:
            self._last_step_seconds = now - self.began_at(in_flight[0])
        self.heard_at = self._result_at = now
        self._paused_seconds = 0.0

    def confirmed(self, record: SentPlan) -> None:
        """Learns from a plan with a valid result that has just arrived."""
        work = self._work if self._oldest is record else self._times.work(record)
        self._times.learn(record, work, self._last_step_seconds)

    def paused(self, seconds: float, *, is_working: bool) -> None:
        """Records that the scheduler did not run for `seconds`, so that it could not hear the worker."""
        self.heard_at += seconds
        self._void_until += seconds
        if is_working:
            self._paused_seconds += seconds

    def voided(self, in_flight: Sequence[SentPlan]) -> None:
        """Records that plans became void. The worker may still compute them, and is silent meanwhile."""
        if in_flight:
            seconds = sum(deadline_seconds(self._times.predict(plan, self._times.work(plan))) for plan in in_flight)
            self._void_until = self.began_at(in_flight[0]) + seconds

    def began_at(self, oldest: SentPlan) -> float:
        """Returns when, on the core's clock, the worker began the oldest plan in flight, moved by pauses."""
        return max(oldest.sent_at, self._result_at) + self._paused_seconds

    def timeout(self, in_flight: Sequence[SentPlan], config: CoreConfig) -> float:
        """Returns the time on the core's clock at which the worker is given up, unless it is heard before.

        It has no plan and is silent for too long, or the oldest plan in flight has no result in time.
        """
        if not in_flight:
            until = self.heard_at + config.silence_timeout_seconds
        else:
            limit = config.step_timeout_seconds
            if config.predict_steps:
                limit = min(limit, deadline_seconds(self._predicted_seconds(in_flight[0])))
            until = self.began_at(in_flight[0]) + limit
        return max(until, self._void_until) if config.predict_steps else until

    def why_given_up(self, in_flight: Sequence[SentPlan], config: CoreConfig, now: float) -> str:
        """Returns the reason why the worker is given up, with the limit that it exceeded."""
        if not in_flight:
            limit = config.silence_timeout_seconds
            return f"it sent no message for {now - self.heard_at:.1f} s; the limit is {limit:g} s"
        oldest, began_at = in_flight[0], self.began_at(in_flight[0])
        predicted = f" (predicted {self._predicted_seconds(oldest):.3g} s)" if config.predict_steps else ""
        return (
            f"its step {oldest.step} has no result after {now - began_at:.1f} s; "
            f"the limit is {self.timeout(in_flight, config) - began_at:.3g} s{predicted}"
        )

    def _predicted_seconds(self, oldest: SentPlan) -> float:
        if self._oldest is not oldest:
            self._oldest, self._work = oldest, self._times.work(oldest)
            self._prediction = self._times.predict(oldest, self._work)
        return self._prediction
