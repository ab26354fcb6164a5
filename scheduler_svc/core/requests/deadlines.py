"""The times at which requests end: their own limits, and the rule of the wait for a worker.

A request that no present worker can hold ends after `max_worker_wait_seconds`.
"""

from scheduler_svc.core.core import Core, Organ
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.resources import named
from scheduler_svc.core.queue.request_queue import DeadlineKind
from scheduler_svc.core.state.request import Request


def add_deadlines(core: Core, request: Request, submit: Submit, now: float) -> None:
    """Adds the deadlines of a new request. Its time limits count from its arrival."""
    limits = {DeadlineKind.TIME_LIMIT: submit.max_time_seconds, DeadlineKind.DEADLINE: submit.deadline_seconds}
    # A request from the journal that has output has run before.
    limits[DeadlineKind.QUEUE_TIME] = 0.0 if request.num_outputs else submit.max_queue_seconds
    for kind, seconds in limits.items():
        if seconds > 0:
            core.queue.add_deadline(request.arrived_at + seconds, request, kind)
    core.update_worker_wait(request, now)


class Deadlines(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Ends the requests whose deadlines have passed. Returns what their callers get to know of their waits."""
        effects: list[fx.Effect] = []
        while (due := self._queue.pop_deadline(now)) is not None:
            effects += self._expire(*due, now)
        return effects

    def _expire(self, request: Request, due: DeadlineKind, at: float, now: float) -> list[fx.Effect]:
        """Ends a request if it is due; `at` is on the core's clock. An error names what the request was waiting for."""
        match due:
            case DeadlineKind.TIME_LIMIT:
                effects = self._core.waits.last_word(request, now)
                self._core.end(request, now, reason=fx.EndReason.TIME_LIMIT)
                return effects
            case DeadlineKind.WORKER_WAIT:
                self._end_worker_wait(request, now)
                return []
            case DeadlineKind.DEADLINE:
                what = f"its deadline passed after {now - request.arrived_at:.3f} s"
            case DeadlineKind.QUEUE_TIME:
                # A request that was preempted or lost its worker has had a row: its caller has waited long enough.
                if request.admitted_at is not None:
                    return []
                limit = f"the limit is {at - request.arrived_at:.7g} s (max_queue_seconds)"
                what = f"it waited {now - request.arrived_at:.3f} s in the queue; {limit}"
        message = f"request {request.submit.request_id}: {what}{self._core.waits.named(request, now)}"
        self._core.end(request, now, failure=fx.Failure(code=fx.FailureCode.DEADLINE, message=message))
        return []

    def _end_worker_wait(self, request: Request, now: float) -> None:
        """Ends a request if no worker was large enough for `max_worker_wait_seconds`.

        The deadline may be of an earlier wait. With an unset maximum, what the request has is its answer.
        """
        limit, since = self._config.max_worker_wait_seconds, request.worker_wait_since
        request.has_wait_deadline = since is not None and now < since + limit
        if since is None:
            return
        if request.has_wait_deadline:
            self._queue.add_deadline(since + limit, request, DeadlineKind.WORKER_WAIT)
            return
        if request.num_outputs and request.submit.is_max_unset:
            # It has all that the workers hold.
            self._core.end(request, now, reason=fx.EndReason.CONTEXT_FULL)
            return
        takes = f" and took {named(request.needs)}" if request.needs else ""
        message = (
            f"for {now - since:.0f} s no worker could hold its {request.size}{takes}; "
            f"the limit is {limit:g} s (max_worker_wait_seconds)"
        )
        message += self._core.waits.named(request, now)
        self._core.end(request, now, failure=fx.Failure(code=fx.FailureCode.NO_WORKER, message=message))

    def next_wake(self) -> float | None:
        return self._queue.next_deadline()
