"""The times at which requests end: `Deadlines` adds them to the queue and ends the requests when they pass.

Owns the rule of the wait for a worker: a request that no present worker can hold ends after `max_worker_wait_seconds`.
"""

from typing import Protocol

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.queue.deadline_heap import DeadlineKind
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.request import Phase, Request
from scheduler_svc.core.waits import Waits
from scheduler_svc.core.workers.lanes import Lanes


class _End(Protocol):
    """Ends a live request with a reason or a failure."""

    def __call__(
        self, request: Request, now: float, *, reason: fx.EndReason | None = None, failure: fx.Failure | None = None
    ) -> None: ...


class Deadlines:
    """`end` ends a live request."""

    def __init__(self, config: CoreConfig, queue: RequestQueue, lanes: Lanes, waits: Waits, end: _End) -> None:
        self._config = config
        self._queue = queue
        self._lanes, self._waits = lanes, waits
        self._end = end

    def begin(self, request: Request, submit: Submit, now: float) -> None:
        """Adds the deadlines of a new request. Its time limits count from its arrival."""
        if submit.max_time_seconds > 0:
            self._queue.add_deadline(request.arrived_at + submit.max_time_seconds, request, DeadlineKind.TIME_LIMIT)
        if submit.deadline_seconds > 0:
            self._queue.add_deadline(request.arrived_at + submit.deadline_seconds, request, DeadlineKind.DEADLINE)
        # A request from the journal that has output has run before.
        if submit.max_queue_seconds > 0 and not request.num_outputs:
            self._queue.add_deadline(request.arrived_at + submit.max_queue_seconds, request, DeadlineKind.QUEUE_TIME)
        self.update_worker_wait(request, now)

    def update_worker_wait(self, request: Request, now: float) -> None:
        """Starts or ends the request's wait for a worker that can hold it."""
        infos = self._lanes.worker_infos
        longest = infos.longest_with_constraints if request.constraint else infos.longest_present
        if request.phase is Phase.RUNNING or request.total_length <= longest:
            request.end_worker_wait()
        elif request.begin_worker_wait(now):
            self._queue.add_deadline(now + self._config.max_worker_wait_seconds, request, DeadlineKind.WORKER_WAIT)

    def expire(self, now: float) -> list[fx.Effect]:
        """Ends the requests whose deadlines have passed. Returns what their callers are told of their waits."""
        effects: list[fx.Effect] = []
        while (due := self._queue.pop_deadline(now)) is not None:
            effects += self._expire(*due, now)
        return effects

    def _expire(self, request: Request, due: DeadlineKind, at: float, now: float) -> list[fx.Effect]:
        """Ends a request, if it is due. An error names what the request was waiting for."""
        match due:
            case DeadlineKind.TIME_LIMIT:
                effects = self._waits.last_word(request, now)
                self._end(request, now, reason=fx.EndReason.TIME_LIMIT)
                return effects
            case DeadlineKind.DEADLINE:
                message = f"request {request.request_id}: its deadline passed after {now - request.arrived_at:.3f} s"
                message += self._waits.named(request, now)
                self._end(request, now, failure=fx.Failure(code=fx.FailureCode.DEADLINE, message=message))
            case DeadlineKind.QUEUE_TIME:
                # A preempted request, or one whose worker was lost, has had a row: its caller has waited long enough.
                if request.admitted_at is None:
                    waited = now - request.arrived_at
                    limit = f"the limit is {at - request.arrived_at:.7g} s (max_queue_seconds)"
                    message = f"request {request.request_id}: it waited {waited:.3f} s in the queue; {limit}"
                    message += self._waits.named(request, now)
                    self._end(request, now, failure=fx.Failure(code=fx.FailureCode.DEADLINE, message=message))
            case DeadlineKind.WORKER_WAIT:
                self._end_worker_wait(request, now)
        return []

    def _end_worker_wait(self, request: Request, now: float) -> None:
        """Ends a request if no worker was large enough for `max_worker_wait_seconds`; checks again later if not."""
        limit, since = self._config.max_worker_wait_seconds, request.worker_wait_since
        ends_at = request.worker_wait_ends_at(now, limit)
        if since is None or ends_at is None:
            return
        if now < ends_at:
            self._queue.add_deadline(ends_at, request, DeadlineKind.WORKER_WAIT)
            return
        takes = " and took constraints" if request.constraint else ""
        message = (
            f"for {now - since:.0f} s no worker could hold its {request.total_length} tokens (prompt and "
            f"max_new_tokens){takes}; the limit is {limit:g} s (max_worker_wait_seconds)"
        )
        message += self._waits.named(request, now)
        self._end(request, now, failure=fx.Failure(code=fx.FailureCode.NO_WORKER, message=message))
