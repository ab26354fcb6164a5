"""Front ends: their joins and losses, and what they learn of the service and of requests that wait.

`FrontEnds` remembers the status that it sent last, so that each change is sent once. Front ends use only this status to
refuse requests before they parse them, because under overload a refusal must be cheap.
"""

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.messages.effects import AnnounceDrain, CoreStatus, Effect, ModelServed, Note
from scheduler_svc.core.messages.events import FrontendJoined, FrontendLost
from scheduler_svc.core.messages.reports import NotServing, WaitReason
from scheduler_svc.core.messages.resources import CONSTRAINT
from scheduler_svc.core.requests.lingering import detach
from scheduler_svc.core.state.worker_infos import Served
from tandem_contract.plural import numbered

RETRY_CHANGE = 1.5
"""The factor by which the estimated time in a full queue changes before front ends get it again."""
_REFUSING = (WaitReason.CRASH_LOOP, WaitReason.SHUTTING_DOWN)
"""If no request is computed for these reasons, new ones are refused. Otherwise they wait."""


class FrontEnds(Organ):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._next_index = 1
        # Why the queue is full (empty if it is not), why no request is computed, number of workers, and when a request
        # that is refused because the queue is full may be sent again.
        self._sent_status: tuple[str, NotServing | None, int, float] = ("", None, 0, 0.0)
        # The places that each front end counts, 0 if none; and how many requests had started when it was told.
        self._told_places = 0, 0

    def tick(self, now: float) -> list[Effect]:
        """Sends front ends the status, and callers the reasons why their requests wait."""
        return [*self._changed_status(now), *self._core.waits.tell(self._frontends, now)]

    def next_wake(self) -> float | None:
        return self._core.waits.next_wake()

    @handles(FrontendJoined)
    def _joined(self, event: FrontendJoined, now: float) -> list[Effect]:
        frontend, is_stopping = event.frontend, self._core.is_stopping
        effects = [*self._drop(frontend, now), *self._changed_status(now)]
        self._frontends[frontend] = self._next_index
        self._next_index += 1
        drain = [AnnounceDrain(frontend=frontend)] if is_stopping else []
        return [*effects, model_of(frontend, self._lanes.worker_infos.served), self._status(frontend, now), *drain]

    @handles(FrontendLost)
    def _lost(self, event: FrontendLost, now: float) -> list[Effect]:
        return self._drop(event.frontend, now)

    def _drop(self, frontend: str, now: float) -> list[Effect]:
        """Frees the requests of a front end that is gone, except for those that linger."""
        if self._frontends.pop(frontend, None) is None:
            return []
        core = self._core
        readers = [entry for entry in core.kept.all if entry.reader is not None and entry.reader[0] == frontend]
        effects = [effect for entry in readers for effect in detach(core, entry, now)]
        for request in [request for request in self._queue if request.frontend == frontend]:
            core.remove(request, now)
        return effects

    def _changed_status(self, now: float) -> list[Effect]:
        """Announces the core's status to every front end, if it changed.

        That the queue is full is sent when that begins and ends, because the numbers in it change constantly, and when
        the estimated time in the queue has changed by RETRY_CHANGE.
        """
        availability = self._core.availability
        availability.look(now, is_stopping=self._core.is_stopping)
        queue_full, not_serving, workers = self._queue_full(), availability.value, availability.num_workers
        before, queue = self._sent_status, self._queue
        seconds = queue.drain.seconds(queue.num_waiting, queue.waiting_tokens, now) if queue_full else 0.0
        is_same = (bool(queue_full), not_serving, workers) == (bool(before[0]), before[1], before[2])
        is_near = before[3] <= seconds * RETRY_CHANGE and seconds <= before[3] * RETRY_CHANGE
        places = None if queue_full else self._places_to_tell(was_full=bool(before[0]))
        if is_same and is_near and places is None:
            return []
        self._sent_status = (queue_full, not_serving, workers, seconds)
        self._told_places = places or 0, queue.drain.num_started
        statuses = [self._status(frontend, now, places or 0) for frontend in self._frontends]
        return [*statuses, *_crash_notes(before[1], not_serving)]

    def _places_to_tell(self, *, was_full: bool) -> int | None:
        """Returns a front end's share of the places of a queue that is not full, to count; None if they know enough.

        They count until half of the queue is free: then it is 0. They are told again when there are twice as many, and
        when as many requests have started as there were, so that no row stays empty for a count.
        """
        told, num_started = self._told_places
        free, most = self._config.max_waiting - self._queue.num_waiting, self._config.max_waiting
        if not told and not was_full:
            return None
        if 2 * free >= most:
            return 0
        places = -(-free // max(1, len(self._frontends)))
        is_news = was_full or places >= 2 * told or self._queue.drain.num_started - num_started >= told
        return places if is_news else None

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

    def _status(self, frontend: str, now: float, places: int = 0) -> CoreStatus:
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
            places=places,
        )


def _crash_notes(before: NotServing | None, now: NotServing | None) -> list[Effect]:
    """Returns a note if a crash loop has begun or ended."""
    did, does = (one is not None and one.reason is WaitReason.CRASH_LOOP for one in (before, now))
    if does and not did and now is not None:
        return [Note(message=f"not serving: {now.message}")]
    return [Note(message="the crash loop is over")] if did and not does else []


def model_of(frontend: str, served: Served | None) -> ModelServed:
    """Returns the description of the model that front ends get."""
    if served is None:
        return ModelServed(frontend=frontend, info=None, recent_max_length=0)
    return ModelServed(
        frontend=frontend,
        info=served.info,
        recent_max_length=served.recent_max_length,
        constraint_refusal=served.refusals[CONSTRAINT],
    )
