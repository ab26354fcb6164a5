"""Knows when a lane's worker was last heard, and how long its current step may take.

A worker computes its plans one after the other. The time of a plan begins when the plan was sent or when the result of
the plan before it arrived, whichever was later. So each of several plans in flight has its own predicted time.
"""

from collections.abc import Sequence

from scheduler_svc.core.limits.step_time import StepTimes, deadline_seconds
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.worker_info import WorkerInfo


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
        """Learns from the plan whose result has just arrived and is valid."""
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
            seconds = sum(deadline_seconds(self._times.predict(each, self._times.work(each))) for each in in_flight)
            self._void_until = self.began_at(in_flight[0]) + seconds

    def began_at(self, oldest: SentPlan) -> float:
        """Returns when the worker began the oldest plan in flight, moved by the time of pauses."""
        return max(oldest.sent_at, self._result_at) + self._paused_seconds

    def timeout(self, in_flight: Sequence[SentPlan], config: CoreConfig) -> float:
        """Returns the time at which the worker is given up, unless it is heard before.

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
        """Returns the predicted time of the oldest plan in flight."""
        if self._oldest is not oldest:
            self._oldest, self._work = oldest, self._times.work(oldest)
            self._prediction = self._times.predict(oldest, self._work)
        return self._prediction
