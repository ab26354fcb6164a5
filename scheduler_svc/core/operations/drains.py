"""All drains: begins them, moves the rows of drained workers, reports progress to operators, and finds when drains end.

`Drains` owns the drains, and remembers nothing of one after its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import Admission
from scheduler_svc.core.messages.reports import DrainReport, DrainState, ResetCause
from scheduler_svc.core.operations.operation import Operation, why_not_watched
from scheduler_svc.core.queue.turns import running_key
from scheduler_svc.core.recovery.held_pools import fits
from scheduler_svc.core.schedule.policy import headroom
from scheduler_svc.core.state.lane import Lane, holds
from scheduler_svc.core.state.lane_phase import LaneMove, LanePhase
from scheduler_svc.core.state.request import Move, Phase, Request
from tandem_contract.plural import numbered

LEAVE_SECONDS = 5.0
"""The seconds within which a dismissed worker ends; after them its lane is closed."""
STAY_SECONDS = 2.0
"""How long the rows of a worker that was asked to stop go on there if no other worker takes them."""


def _can_continue(heir: Lane, lane: Lane) -> bool:
    """Returns whether the standby worker can continue from the pages of this one."""
    has_pages = bool(lane.pages.pool_id) and not lane.phases.is_loading and lane.pool.num_cached > 0
    return has_pages and fits(lane.info, heir.info)


def _detail_of(lane: Lane, lanes: Lanes) -> str:
    """Returns in one sentence what the drain of this worker waits for."""
    stay, rows = lane.phases.stay, lane.rows.num_seated
    if stay is LanePhase.DISMISSED:
        return "the worker was told to end"
    if stay is LanePhase.HANDING_OVER:
        return f"{numbered(rows, 'request', 'go')} to a standby worker when the worker's present steps are done"
    longest = max((other.info.longest_sequence for other in lanes.serving), default=0)
    seated = lane.rows.requests_at(lane.rows.seated())
    bound = sum(request.least_length(int(lane.rows.known[request.row])) > longest for request in seated)
    if bound == rows:
        return f"{numbered(rows, 'request', 'end')} on this worker, because no other one can hold them"
    return f"{numbered(rows - bound, 'request', 'move')} when other workers have room; {bound} end here"


def _tokens_left(lane: Lane) -> int:
    """Returns the largest number of tokens that the rows of the lane are expected to produce still."""
    rows = lane.rows
    seated = rows.seated()
    return int(rows.expected(seated, rows.known[seated] - 1).sum())


@dataclass(slots=True)
class _Room:
    """What a lane can take from a drained one in this tick: rows, tokens of about one step, and pages."""

    lane: Lane
    rows: int
    tokens: int
    pages: int

    @classmethod
    def on(cls, lane: Lane, moving: Sequence[Request], admission: Admission) -> "_Room":
        """The room that requests which were moved before, and have no row yet, leave."""
        unused, left = lane.pool.num_unused - headroom(lane, admission), lane.rows.known - lane.rows.planned
        uncomputed = int(left[lane.rows.seated()].clip(0).sum())
        return cls(
            lane,
            rows=lane.num_free_rows - len(moving),
            tokens=lane.info.token_budget - uncomputed - sum(one.known for one in moving),
            pages=unused - sum(lane.pages_for(one.known) + 1 for one in moving),
        )

    def takes(self, request: Request, known: int) -> bool:
        """Takes up the room of a request with `known` tokens, if there is as much: then True."""
        info = self.lane.info
        needed = info.pages_at_once(known + 1) + 1
        if self.rows <= 0 or self.pages < needed or not holds(self.lane, request, known):
            return False
        if self.tokens < min(known, info.token_budget):
            return False
        self.rows, self.tokens, self.pages = self.rows - 1, self.tokens - known, self.pages - needed
        return True


@dataclass(slots=True, kw_only=True)
class _Drain(Operation[DrainState]):
    """One drain. `worker` has the lane's number too, because a worker that joins again has another lane."""

    worker: str
    lane_number: int
    state: DrainState = DrainState.DRAINING
    is_wished: bool = False
    """Whether only the worker has asked for it."""
    moving: list[Request] = field(default_factory=list[Request])
    """Requests that were moved and have no row yet."""
    moved: int = 0


class Drains(Organ):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        # By worker; the service's has the empty name.
        self._drains = dict[str, _Drain]()

    @handles(ev.Drain)
    def begin(self, event: ev.Drain, now: float) -> list[fx.Effect]:
        """Begins a drain, or lets the operator watch one that has begun. The next Tick answers."""
        if event.stop_replies:
            for drain in self._drains.values():
                drain.leave(event)
            return []
        if message := why_not_watched(self._drains.values(), "drains"):
            return [_refused(event, fx.RejectCode.QUEUE_FULL, message)]
        ends_at = now + event.max_seconds if event.max_seconds else None
        if not event.worker:
            effects, core = self._stop(event, now), self._core
            core.is_stop_wanted = True
            self._drains[""].watch(event, ends_at)
            core.stop_at = self._drains[""].ends_at
            return effects
        lane = self._find(event.worker)
        if lane is None:
            present = ", ".join(self._lanes) or "none"
            message = f"worker: there is no worker {event.worker!r}; the workers are: {present}"
            return [_refused(event, fx.RejectCode.NOT_FOUND, message)]
        drain = self._drains.get(lane.worker)
        if drain is None:
            if not event.force and self._is_last(lane):
                message = (
                    f"worker: {lane.worker} is the only worker that serves, and none is on standby; start another one "
                    "first, set force to let its requests end there while new ones wait, or drain the service"
                )
                return [_refused(event, fx.RejectCode.INVALID, message)]
            drain = self._drain_worker(lane, now)
        drain.is_wished = False
        drain.watch(event, ends_at)
        return []

    @handles(ev.WorkerStops)
    def worker_stops(self, event: ev.WorkerStops, now: float) -> list[fx.Effect]:
        """Begins the drain that a worker wishes which was asked to stop; while the service stops, none."""
        lane = self._lanes.get(event.worker)
        if lane is None or lane.worker in self._drains:
            return []
        if self._core.is_stopping:
            message = f"worker {lane.worker} was asked to stop too; it stays until the service has stopped"
            return [fx.News(message=message)]
        drain = self._drain_worker(lane, now)
        drain.is_wished, drain.ends_at = True, now + STAY_SECONDS
        then = f"those that no other worker takes within {STAY_SECONDS:g} s wait for one"
        return [fx.News(message=f"worker {lane.worker} was asked to stop: its requests move; {then}")]

    def _drain_worker(self, lane: Lane, now: float) -> _Drain:
        drain = _Drain(worker=lane.worker, lane_number=lane.number, began_at=now)
        self._drains[lane.worker] = drain
        # No further request starts on the lane. Callers see the sizes of the other workers from now on.
        lane.phases.move(LaneMove.DRAIN)
        if lane.phases.serves:
            self._lanes.worker_infos.worker_left(lane.info, now)
            self._lanes.serving_changed()
        return drain

    def _put_wishes_off(self) -> None:
        """Lets workers that were asked to stop serve again, except those that were dismissed."""
        for drain in list(self._drains.values()):
            if drain.is_wished and drain.state is DrainState.DRAINING:
                del self._drains[drain.worker]
                if (lane := self._lane_of(drain)) is not None:
                    lane.phases.move(LaneMove.STAY)
                    if lane.phases.seat is LanePhase.REPLACED:
                        lane.phases.move(LaneMove.SEAT)
                    self._lanes.serving_changed()

    @handles(ev.DrainStarted)
    def _stop(self, event: ev.Drain | ev.DrainStarted, now: float) -> list[fx.Effect]:
        """Stops the service: new requests are rejected."""
        if self._core.is_stopping:
            return []
        self._core.is_stopping = True
        self._put_wishes_off()
        detail = "new requests are refused, the others may end"
        self._drains[""] = _Drain(worker="", lane_number=0, began_at=now, detail=detail)
        return [fx.AnnounceDrain(frontend=frontend) for frontend in self._frontends]

    @handles(ev.DrainEnded)
    def ended(self, event: ev.DrainEnded, now: float) -> list[fx.Effect]:
        """Ends all live requests, because the time for the stop is over."""
        if len(self._queue) and (drain := self._drains.get("")) is not None:
            detail = f"the time was over; {numbered(len(self._queue), 'request')} ended with UNAVAILABLE"
            drain.end(DrainState.TIME_LIMIT, detail)
        message = "the service shut down before the request ended"
        for request in list(self._queue):
            self._core.end(request, now, failure=fx.Failure(code=fx.FailureCode.SHUTDOWN, message=message))
        return []

    def tick(self, now: float) -> list[fx.Effect]:
        """Moves rows, dismisses empty workers, and reports."""
        effects: list[fx.Effect] = []
        for drain in list(self._drains.values()):
            if drain.worker:
                effects += self._advance_worker(drain, now)
            elif drain.state is DrainState.DRAINING and not len(self._queue):
                drain.end(DrainState.DONE, "all requests have ended; the service stops")
            effects += drain.reports(DrainReport, self._core, now, lambda drain=drain: self._figures(drain))
            if drain.worker and drain.state.is_final:
                del self._drains[drain.worker]
        return effects

    def next_wake(self) -> float | None:
        """Returns the time on the core's clock of a drain's first end or report, None without a drain."""
        return min((at for drain in self._drains.values() for at in drain.due_times()), default=None)

    def _find(self, worker: str) -> Lane | None:
        """Returns the lane of the worker with this name or process id."""
        lanes = self._lanes
        return lanes.get(worker) or next((lane for lane in lanes.values() if worker == str(lane.info.pid)), None)

    def _lane_of(self, drain: _Drain) -> Lane | None:
        """Returns the lane that is drained, None if it is closed."""
        lane = self._lanes.get(drain.worker)
        return None if lane is None or lane.number != drain.lane_number else lane

    def _advance_worker(self, drain: _Drain, now: float) -> list[fx.Effect]:
        lane = self._lane_of(drain)
        if lane is None:
            if drain.state is DrainState.LEAVING:
                drain.end(DrainState.DONE, "the worker has left")
            else:
                drain.end(DrainState.WORKER_LOST, "the worker was lost; its requests go on elsewhere")
            return []
        if drain.state is DrainState.LEAVING:
            if not drain.is_late(now):
                return []
            # It does not end, perhaps because it hangs. It has no request.
            drain.end(DrainState.DONE, "the worker has no request and was dismissed")
            return self._close(lane, "it was drained", now, is_orderly=True)
        if drain.is_late(now):
            rows = lane.rows.num_seated
            detail = f"the time was over; {numbered(rows, 'request', 'wait')} for another worker"
            drain.end(DrainState.TIME_LIMIT, detail)
            reason = "it stops" if drain.is_wished else "its drain took too long"
            closed = self._close(lane, reason, now, is_orderly=drain.is_wished)
            return [fx.DismissWorker(worker=lane.worker), *closed]
        drain.moving = [request for request in drain.moving if request.phase is Phase.WAITING]
        effects = self._advance_rows(drain, lane, now)
        if lane.phases.stay is LanePhase.DISMISSED:
            drain.state = DrainState.LEAVING
            drain.ends_at = now + LEAVE_SECONDS
            drain.moved += lane.rows.num_seated
        drain.detail = _detail_of(lane, self._lanes)
        return effects

    def _is_last(self, lane: Lane) -> bool:
        """Returns whether no worker would serve without this one."""
        others = any(other is not lane for other in self._lanes.serving)
        return lane.phases.serves and not others and self._lanes.first_proven() is None

    def _advance_rows(self, drain: _Drain, lane: Lane, now: float) -> list[fx.Effect]:
        """Moves rows of the lane if others have room, and dismisses the worker when it is empty."""
        phases, effects = lane.phases, list[fx.Effect]()
        heir = self._lanes.first_proven() if phases.seat is LanePhase.SERVING else None
        hands_over = heir is not None and _can_continue(heir, lane)
        if hands_over != (phases.stay is LanePhase.HANDING_OVER):
            phases.move(LaneMove.HAND_OVER if hands_over else LaneMove.DRAIN)
        if hands_over:
            if lane.in_flight:
                return []
        else:
            if heir is not None:
                phases.move(LaneMove.REPLACE)
                effects += self._lanes.seat_next(now)
            self._move_rows(drain, lane)
            if lane.rows.num_seated or (lane.in_flight and phases.serves):
                return effects
        phases.move(LaneMove.DISMISS)
        return [*effects, fx.DismissWorker(worker=lane.worker)]

    def _move_rows(self, drain: _Drain, lane: Lane) -> None:
        """Sends rows back to the queue that another lane has room for, those first that come first in the queue.

        Each lane gets about one step of tokens at a time, so that the rows wait here no longer than they must.
        """
        before = tuple(drain.moving)
        # Suspects run only in trials, which are on other lanes from now on.
        for request in lane.rows.requests_at(lane.rows.seated()):
            if self._queue.is_held(request):
                self._release(drain, lane, request)
        others = (other for other in self._lanes.serving if other.num_free_rows and not other.schedule.blocked)
        rooms = [_Room.on(other, before, self._config.policy.admission) for other in others]
        for request in sorted(lane.rows.requests_at(lane.rows.seated()), key=running_key) if rooms else ():
            known = int(lane.rows.known[request.row])
            if any(room.takes(request, known) for room in rooms):
                self._release(drain, lane, request)

    def _release(self, drain: _Drain, lane: Lane, request: Request) -> None:
        lane.unseat(request, Move.RESET)
        self._queue.enqueue(request)
        drain.moving.append(request)
        drain.moved += 1

    def _close(self, lane: Lane, reason: str, now: float, *, is_orderly: bool) -> list[fx.Effect]:
        drained = ResetCause.DRAINED
        return self._lanes.close(lane.worker, reason, now, drained, is_death=False, is_orderly=is_orderly)

    def _figures(self, drain: _Drain) -> dict[str, Any]:
        """Returns what a report has beside the fields of every operation."""
        lane = self._lanes.get(drain.worker)
        tokens_left = _tokens_left(lane) if lane else 0
        if not drain.worker:
            tokens_left = sum(one.submit.expected(one.total_length - one.known) for one in self._queue.waiting())
            tokens_left += sum(_tokens_left(one_lane) for one_lane in self._lanes.values())
        rows = lane.rows.num_seated if lane else 0
        return {"worker": drain.worker, "worker_running": rows, "tokens_left": tokens_left, "moved": drain.moved}


def _refused(event: ev.Drain, code: fx.RejectCode, message: str) -> fx.DrainRefused:
    return fx.DrainRefused(frontend=event.frontend, query=event.query, code=code, message=message)
