"""Announcements to front ends: the served model, and whether the core accepts requests.

The announcer remembers what it sent last, so that each change is sent once. Front ends use only this status to refuse
requests before they parse them, because under overload a refusal must be cheap.
"""

from collections.abc import Iterable

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.effects import CoreStatus, Effect, ModelServed, Note
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.worker_infos import Served
from scheduler_svc.core.workers.lanes import Lanes

RETRY_CHANGE = 1.5
"""The factor by which the estimated time in a full queue changes before front ends are told again."""


class Announcer:
    """Makes announcements from the queue and the lanes, and does not change them."""

    def __init__(self, config: CoreConfig, queue: RequestQueue, lanes: Lanes) -> None:
        self._config = config
        self._queue = queue
        self._lanes = lanes
        self._sent_served: Served | None = None
        # Why the queue is full, why the core does not serve (empty if it does not apply), number of workers, and when
        # a request that is refused because the queue is full may be sent again.
        self._sent_status = ("", "", 0, 0.0)

    def greeting(self, frontend: str) -> list[Effect]:
        """Returns the announcements for a front end that joins."""
        return [_model(frontend, self._lanes.worker_infos.served), self._status(frontend)]

    def changed_model(self, frontends: Iterable[str]) -> list[Effect]:
        """Returns the served model for every front end, if callers see a difference."""
        served = self._lanes.worker_infos.served
        if served is self._sent_served:
            return []
        self._sent_served = served
        return [_model(frontend, served) for frontend in frontends]

    def changed_status(self, frontends: Iterable[str], now: float) -> list[Effect]:
        """Returns the core's status for every front end, if it changed.

        A status is sent when a reason appears or disappears, because the numbers in the reasons change constantly;
        and when the estimated time in the queue has changed by RETRY_CHANGE.
        """
        queue_full, not_serving = self._queue_full(), self._lanes.crash_loop.cause(now)
        before, queue = self._sent_status, self._queue
        seconds = queue.drain.seconds(queue.num_waiting, queue.waiting_tokens, now) if queue_full else 0.0
        is_same = (bool(queue_full), bool(not_serving)) == (bool(before[0]), bool(before[1]))
        is_near = before[3] <= seconds * RETRY_CHANGE and seconds <= before[3] * RETRY_CHANGE
        if is_same and is_near and before[2] == len(self._lanes.seated):
            return []
        self._sent_status = (queue_full, not_serving, len(self._lanes.seated), seconds)
        effects: list[Effect] = [self._status(frontend) for frontend in frontends]
        if bool(not_serving) != bool(before[1]):
            message = f"not serving: {not_serving}" if not_serving else "serving again after a crash loop"
            effects.append(Note(message=message))
        return effects

    def _queue_full(self) -> str:
        """Returns the reason if the queue is full, otherwise an empty string.

        With several tenants it is never full for all of them, because each has places of its own.
        """
        queue, config = self._queue, self._config
        if queue.accounts.is_shared:
            return ""
        if queue.num_waiting >= config.max_waiting:
            return f"{queue.num_waiting} requests are waiting; the limit is {config.max_waiting} (max_waiting)"
        limit = config.max_waiting_tokens
        if queue.waiting_tokens >= limit:
            return f"{queue.waiting_tokens} tokens are waiting; the limit is {limit} (max_waiting_tokens)"
        return ""

    def _status(self, frontend: str) -> CoreStatus:
        queue_full, not_serving, workers, seconds = self._sent_status
        return CoreStatus(
            frontend=frontend,
            queue_full=queue_full,
            not_serving=not_serving,
            workers=workers,
            retry_seconds=seconds,
        )


def _model(frontend: str, served: Served | None) -> ModelServed:
    if served is None:
        return ModelServed(frontend=frontend, info=None, recent_max_length=0)
    return ModelServed(
        frontend=frontend,
        info=served.info,
        recent_max_length=served.recent_max_length,
        constraint_refusal=served.constraint_refusal,
    )
