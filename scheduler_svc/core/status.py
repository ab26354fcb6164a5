"""What the core tells of itself: whether a request that arrives now is computed, the served model, its status and load.

`Availability` is the one truth about health: a pure function of the lanes, the crash loop and the drain, remembered
with the time since which it holds. Front ends, metrics and `Waits` read it.

`Announcer` remembers what it sent last, so that each change is sent once. Front ends use only this status to refuse
requests before they parse them, because under overload a refusal must be cheap.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.effects import CoreStatus, Effect, ModelServed, Note
from scheduler_svc.core.messages.reports import Incidents, Load, NotServing, WaitReason, WorkerLoad, WorkerState
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.memory_limit import Reduction
from scheduler_svc.core.state.worker_infos import Served
from tandem_contract.plural import numbered

# From the nearest to serving to the farthest: the reason if no worker is nearer.
_REASONS = {
    WorkerState.STARTING: WaitReason.WORKER_STARTING,
    WorkerState.LOADING: WaitReason.LOADING_WEIGHTS,
    WorkerState.STANDBY: WaitReason.ON_STANDBY,
    WorkerState.REFUSED: WaitReason.WEIGHTS_REFUSED,
    WorkerState.DRAINING: WaitReason.WORKERS_LEAVING,
}
_ORDER = list(_REASONS)
_MAX_REASON = 500
NOBODY = "no worker has joined yet"


@dataclass(slots=True)
class Availability:
    """`look` updates the values, `_lanes` are all lanes."""

    _lanes: Lanes
    blocked: NotServing | None = None
    """Why no worker computes anything for a request that waits; None if one does."""
    value: NotServing | None = None
    """Why a request that arrives now is not computed: `blocked`, or it is refused. None while requests are."""
    num_workers: int = 0
    """Workers that take requests."""

    def look(self, now: float, *, is_stopping: bool) -> None:
        """Reads the state. `is_stopping`: the service is drained."""
        lanes = self._lanes
        self.num_workers = sum([lane.weights.admits for lane in lanes.serving])
        crash = lanes.crash_loop.cause(now)
        if self.num_workers and not crash and not is_stopping:
            self.blocked = self.value = None
            return
        blocked = None if self.num_workers else (WaitReason.CRASH_LOOP, crash) if crash else self._cause()
        self.blocked = _since(self.blocked, blocked, now)
        if is_stopping:
            cause = WaitReason.SHUTTING_DOWN, "the service is shutting down"
        else:
            cause = (WaitReason.CRASH_LOOP, crash) if crash else blocked
        self.value = _since(self.value, cause, now)

    @property
    def why_no_model(self) -> str:
        """Why no worker has been proven since the start, in one sentence."""
        return NOBODY if self.blocked is None else self.blocked.message

    def _cause(self) -> tuple[WaitReason, str]:
        """Returns why no lane takes requests: that of the lane which is nearest to it."""
        lanes = self._lanes
        if not lanes.by_worker:
            if not lanes.last_end:
                return WaitReason.NO_WORKER, NOBODY
            is_lost, what = lanes.last_end
            reason = WaitReason.WORKER_LOST if is_lost else WaitReason.NO_WORKER
            return reason, f"no worker is connected; {what[:_MAX_REASON]}"
        states = [(*state_of(lane, lanes.leaving), lane.worker) for lane in lanes.by_worker.values()]
        state, what, worker = min(states, key=lambda each: _ORDER.index(each[0]))
        return _REASONS[state], f"worker {worker} {what}"


def _since(before: NotServing | None, cause: tuple[WaitReason, str] | None, now: float) -> NotServing | None:
    """Returns the value for a cause: the same object if nothing has changed."""
    if cause is None or (before is not None and (before.reason, before.message) == cause):
        return None if cause is None else before
    return NotServing(reason=cause[0], message=cause[1], since=now if before is None else before.since)


def state_of(lane: Lane, leaving: Container[str]) -> tuple[WorkerState, str]:
    """Returns what a lane's worker does, and a text that continues a sentence about it."""
    marks, version = lane.weights, lane.weights.version
    refused = f"cannot load weights {version!r}: {marks.refusal[:_MAX_REASON]}" if marks.refusal else ""
    if lane.worker in leaving:
        return WorkerState.DRAINING, "is drained"
    if lane.serves and marks.admits:
        return WorkerState.SERVING, refused
    if refused:
        return WorkerState.REFUSED, refused
    if marks.loading is not None:
        return WorkerState.LOADING, f"loads weights {version!r}"
    if marks.is_held or not marks.admits:
        return WorkerState.LOADING, "has other weights than the service's, and is about to load them"
    if lane.proven_at is None:
        return WorkerState.STARTING, "has joined and computes its first step"
    return WorkerState.STANDBY, "is on standby"


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
        """Announces the served model to every front end, if callers see a difference."""
        served = self._lanes.worker_infos.served
        if served is self._sent_served:
            return []
        self._sent_served = served
        return [_model(frontend, served) for frontend in frontends]

    def changed_status(self, frontends: Iterable[str], now: float) -> list[Effect]:
        """Announces the core's status to every front end, if it changed.

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


def load_of(
    lanes: Lanes, queue: RequestQueue, step_ms: float, output_tokens: int, weights_version: str, now: float
) -> Load:
    """Returns the load at `now`. `output_tokens` is the number of tokens emitted since the start."""
    lost_at, lost_reason = lanes.last_loss or (None, "")
    counters, seated, leaving = lanes.counters, lanes.seated, lanes.leaving
    reductions = counters.memory_reductions
    each = [_of_lane(lane, leaving) for lane in seated]
    on_standby = [_of_lane(lane, leaving) for lane in lanes.by_worker.values() if not lane.is_seated]
    return Load(
        running=sum(one.running for one in each),
        waiting=queue.num_waiting,
        waiting_tokens=queue.waiting_tokens,
        pages_used=sum(one.pages_used for one in each),
        pages_total=sum(one.pages_total for one in each),
        workers=sum(one.state is WorkerState.SERVING for one in each),
        steps=counters.steps,
        step_ms=step_ms,
        preemptions=counters.preemptions,
        lane_resets=counters.resets,
        output_tokens=output_tokens,
        worker_pid=each[0].pid if each else 0,
        pages_cached=sum(one.pages_cached for one in each),
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        host_pages_used=sum(lane.host.num_used for lane in seated),
        host_pages_total=sum(lane.host.num_slots for lane in seated),
        per_worker=(*each, *on_standby),
        worker_lost_seconds=None if lost_at is None else now - lost_at,
        worker_lost_reason=lost_reason,
        suspects=len(lanes.suspects),
        standby_workers=sum(one.state is WorkerState.STANDBY for one in on_standby),
        incidents=Incidents(
            hung_workers=counters.hung_workers,
            smaller_steps=reductions[Reduction.SMALLER_STEP],
            fewer_rows=reductions[Reduction.FEWER_ROWS],
            alone=reductions[Reduction.ALONE],
            ended_for_memory=reductions[Reduction.ENDED],
            workers_refused_for_memory=reductions[Reduction.REFUSED],
        ),
        held_pools=lanes.held_pools.load(now),
        weights_version=weights_version,
    )


def _of_lane(lane: Lane, leaving: Container[str]) -> WorkerLoad:
    state, detail = state_of(lane, leaving)
    return WorkerLoad(
        pid=lane.info.pid,
        device=lane.info.device,
        running=lane.rows.num_seated,
        pages_used=lane.pool.num_used,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        is_standby=not lane.is_seated,
        name=lane.worker,
        is_draining=lane.worker in leaving,
        weights_version=lane.info.weights_version,
        state=state,
        detail=detail if lane.weights.refusal else "",
    )


REPORT_SECONDS = 1.0


@dataclass(slots=True)
class Watchers:
    """The operators that watch a drain or an update: front end and query of each."""

    each: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    reports_at: float = 0.0
    _reported: object = None

    def due(self, state: object, frontends: Container[str], now: float) -> list[tuple[str, int]]:
        """Decides who gets a report now: once a second and at each change of `state`. Forgets who is gone."""
        self.each = {watcher for watcher in self.each if watcher[0] in frontends}
        if not self.each or (now < self.reports_at and state == self._reported):
            return []
        self.reports_at, self._reported = now + REPORT_SECONDS, state
        return sorted(self.each)
