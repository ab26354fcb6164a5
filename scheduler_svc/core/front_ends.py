"""What front ends are told: the served model, and whether a request that arrives now is computed.

`Announcer` remembers what it sent last, so that each change is sent once. Front ends use only this status to refuse
requests before they parse them, because under overload a refusal must be cheap.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.effects import CoreStatus, Effect, ModelServed, Note
from scheduler_svc.core.messages.reports import NotServing, WaitReason
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.worker_infos import Served
from scheduler_svc.core.status import Availability
from tandem_contract.plural import numbered

RETRY_CHANGE = 1.5
"""The factor by which the estimated time in a full queue changes before front ends are told again."""
_REFUSING = (WaitReason.CRASH_LOOP, WaitReason.SHUTTING_DOWN)
"""If no request is computed for these reasons, new ones are refused. Otherwise they wait."""


@dataclass(slots=True)
class Announcer:
    """Makes announcements from the queue, the lanes and the availability, and does not change them."""

    _config: CoreConfig
    _queue: RequestQueue
    _lanes: Lanes
    _availability: Availability
    _sent_served: Served | None = None
    # Why the queue is full (empty if it is not), why no request is computed, number of workers, and when a request that
    # is refused because the queue is full may be sent again.
    _sent_status: tuple[str, NotServing | None, int, float] = ("", None, 0, 0.0)

    def greeting(self, frontend: str, now: float) -> list[Effect]:
        """Returns the announcements for a front end that joins."""
        return [_model(frontend, self._lanes.worker_infos.served), self._status(frontend, now)]

    def changed_model(self, frontends: Iterable[str]) -> list[Effect]:
        """Returns the served model for every front end, if callers see a difference."""
        served = self._lanes.worker_infos.served
        if served is self._sent_served:
            return []
        self._sent_served = served
        return [_model(frontend, served) for frontend in frontends]

    def changed_status(self, frontends: Iterable[str], now: float) -> list[Effect]:
        """Returns the core's status for every front end, if it changed.

        That the queue is full is sent when that begins and ends, because the numbers in it change constantly, and when
        the estimated time in the queue has changed by RETRY_CHANGE.
        """
        queue_full, not_serving, workers = self._queue_full(), self._availability.value, self._availability.num_workers
        before, queue = self._sent_status, self._queue
        seconds = queue.drain.seconds(queue.num_waiting, queue.waiting_tokens, now) if queue_full else 0.0
        is_same = (bool(queue_full), not_serving, workers) == (bool(before[0]), before[1], before[2])
        is_near = before[3] <= seconds * RETRY_CHANGE and seconds <= before[3] * RETRY_CHANGE
        if is_same and is_near:
            return []
        self._sent_status = (queue_full, not_serving, workers, seconds)
        effects: list[Effect] = [self._status(frontend, now) for frontend in frontends]
        if _crashes(not_serving) and not _crashes(before[1]) and not_serving is not None:
            effects.append(Note(message=f"not serving: {not_serving.message}"))
        elif _crashes(before[1]) and not _crashes(not_serving):
            effects.append(Note(message="the crash loop is over"))
        return effects

    def _queue_full(self) -> str:
        """Returns the reason if the queue is full, otherwise an empty string.

        With several tenants it is never full for all of them, because each has places of its own.
        """
        queue, config = self._queue, self._config
        if queue.accounts.is_shared:
            return ""
        if queue.num_waiting >= config.max_waiting:
            waiting = numbered(queue.num_waiting, "request", "are")
            return f"{waiting} waiting; the limit is {config.max_waiting} (max_waiting)"
        limit = config.max_waiting_tokens
        if queue.waiting_tokens >= limit:
            waiting = numbered(queue.waiting_tokens, "token", "are")
            return f"{waiting} waiting; the limit is {limit} (max_waiting_tokens)"
        return ""

    def _status(self, frontend: str, now: float) -> CoreStatus:
        queue_full, not_serving, workers, seconds = self._sent_status
        return CoreStatus(
            frontend=frontend,
            queue_full=queue_full,
            not_serving="" if not_serving is None else not_serving.message,
            reason=None if not_serving is None else not_serving.reason,
            not_serving_seconds=0.0 if not_serving is None else now - not_serving.since,
            refuses=not_serving is not None and not_serving.reason in _REFUSING,
            workers=workers,
            retry_seconds=seconds,
        )


def _crashes(not_serving: NotServing | None) -> bool:
    return not_serving is not None and not_serving.reason is WaitReason.CRASH_LOOP


def _model(frontend: str, served: Served | None) -> ModelServed:
    if served is None:
        return ModelServed(frontend=frontend, info=None, recent_max_length=0)
    return ModelServed(
        frontend=frontend,
        info=served.info,
        recent_max_length=served.recent_max_length,
        constraint_refusal=served.constraint_refusal,
    )
