"""The weights of the service, and their updates while requests run.

One worker loads first: it checks the folder, so a wrong folder changes nothing. When it has loaded, its weights are
those of the service, and all other lanes follow, one by one with `in_turn`. The same holds for a worker that joins
later with other weights: it loads before it gets a request. A lane with other weights than the service's gets no new
request while another lane serves; it loads as soon as it has none.

A worker is asked to load when it has no plan in flight, and gets no plan before its answer. If it refuses,
its lane goes on as it was.

No page that older weights computed is found afterwards: all pages leave the cache, also those in host memory. With
CONTINUE rows keep theirs; such rows cache no page and share none with their siblings until they start again.

| running | a lane's requests |
|---|---|
| FINISH | end with the old weights; no other starts on the lane meanwhile |
| RECOMPUTE | pause while the worker loads; then the lane is reset, and they start again with their known tokens |
| CONTINUE | pause while the worker loads; then go on with the pages of the old weights |
| ABORT | pause while the worker loads; then end with ABORTED |

So a folder that the worker refuses costs them that pause and nothing else.

**Pages.** The worker drops its labels with the swap. The pool of a dead worker is taken over only by a lane with the
same version, and never if its worker died while it loaded.

**Where versions come from.** `Core.weights` is what the first worker of an update has loaded. The journal keeps it.
Without a journal a new core takes the version and the folder from the first worker that joins with some. A lane that
joins with another version loads before its first plan; if it cannot, it tries again every 5 s and serves no request
meanwhile. It does not count as a worker then, and health has its words.

**Two workers lost** while they load before any has loaded end the update: the folder may be the cause.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights, WeightsLoaded, WeightsRestored
from scheduler_svc.core.messages.reports import ResetCause, UpdateState, WeightsReport
from scheduler_svc.core.operations.operation import Operation, why_not_watched
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.lane_phase import LaneMove, LanePhase
from tandem_contract.plural import numbered


def swapped(lane: Lane, core: Core, weights: Weights, now: float) -> list[fx.Effect]:
    """Applies the lane's new weights to the core's state."""
    running = lane.weights.running
    lane.take_weights(weights)
    lane.schedule.lookups.clear()
    if lane.pages.pending is not None:
        lane.pages.drop_take_over()
    requests = lane.rows.requests_at(lane.rows.seated())
    if running is Running.CONTINUE and requests:
        for request in requests:
            request.weights.begin(weights.version, int(lane.rows.known[request.row]) - request.prompt_tokens)
            request.weights.keeps_pages = True
        lane.pages.evict_all()
        lane.pages.labels.forget()
        going_on = numbered(len(requests), "request", "go")
        return [fx.News(message=f"worker {lane.worker} has weights {weights.version!r}; {going_on} on")]
    if running is Running.ABORT:
        for request in requests:
            core.end(request, now, reason=fx.EndReason.ABORTED)
    what = f"worker {lane.worker} has weights {weights.version!r}"
    return core.lanes.reset(lane, what, now, ResetCause.NEW_WEIGHTS, 0, keep_pages=False)


MAX_LOSSES = 2


@dataclass(slots=True, kw_only=True)
class Update(Operation[UpdateState]):
    """An update from its acceptance to its final report."""

    weights: Weights
    running: Running
    in_turn: bool
    state: UpdateState = UpdateState.UPDATING
    detail: str = "the first worker loads the weights"
    is_committed: bool = False
    """Whether a worker has loaded the weights, so that all others will."""
    num_lost: int = 0
    """Workers that were lost while they loaded before another one had."""
    first: int = 0
    """Number of the lane that loads first."""


RETRY_SECONDS = 5.0
"""A worker that could not load the service's weights is asked again after this time."""
LOAD_SECONDS = 600.0
"""A worker that has not answered by then is given up."""
MAX_VERSIONS = 1024


class Updates(Organ):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._update: Update | None = None
        self._used = deque[str](maxlen=MAX_VERSIONS)
        self._looked_at = -inf

    @handles(UpdateWeights)
    def asked(self, event: UpdateWeights, now: float) -> list[fx.Effect]:
        """Begins an update, lets the operator watch the same one that goes on, or refuses it. The next Tick answers."""
        if event.stop_replies:
            if self._update is not None:
                self._update.leave(event)
            return []
        if (refusal := self._refusal(event)) is not None:
            return [refusal]
        if self._update is None:
            for lane in self._lanes.values():
                lane.weights.retry_at, lane.weights.refusal = 0.0, ""
            self._update = Update(weights=event.weights, running=event.running, in_turn=event.in_turn, began_at=now)
        self._update.watch(event, now + event.max_seconds)
        return []

    def _refusal(self, event: UpdateWeights) -> fx.UpdateRefused | None:
        """Returns why no update begins and no operator watches, or None."""
        weights, roots, going_on = event.weights, self._config.weights_folders, self._update
        asked = weights, event.running, event.in_turn

        def refused(code: fx.RejectCode, message: str, field: str = "") -> fx.UpdateRefused:
            return fx.UpdateRefused(frontend=event.frontend, query=event.query, code=code, message=message, field=field)

        if not roots:
            message = "updates of weights are off; start the service with --weights-folders FOLDER"
            return refused(fx.RejectCode.NOT_FOUND, message)
        if why := why_not_allowed(weights.folder, roots):
            return refused(fx.RejectCode.INVALID, f"folder: {why}", "folder")
        if going_on is not None and asked == (going_on.weights, going_on.running, going_on.in_turn):
            why = why_not_watched([going_on], "the update of weights")
            return refused(fx.RejectCode.QUEUE_FULL, why) if why else None
        if going_on is not None:
            version = going_on.weights.version
            message = f"the update to version {version!r} goes on; another one may begin when it has ended"
            return refused(fx.RejectCode.DUPLICATE, message)
        if weights.version in self._used:
            message = f"version: {weights.version!r} was used before; a version names the same weights for ever"
            return refused(fx.RejectCode.INVALID, message, "version")
        if not self._lanes:
            return refused(fx.RejectCode.NOT_READY, "no worker has joined; an update needs one that checks the folder")
        return None

    @handles(WeightsRestored)
    def restored(self, event: WeightsRestored, now: float) -> list[fx.Effect]:
        """Continues with the weights of an earlier process."""
        self._take(event.weights)
        return []

    @handles(WeightsLoaded)
    def loaded(self, event: WeightsLoaded, now: float) -> list[fx.Effect]:
        """Handles a worker's answer."""
        lane = self._lanes.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        lane.clock.heard(now)
        weights = lane.weights.ordered
        if not lane.phases.is_loading or weights.version != event.version:
            return []
        lane.phases.move(LaneMove.ANSWER)
        if not event.ok:
            return self._refused(lane, weights, event.detail, now)
        lane.weights.refusal = ""
        effects = swapped(lane, self._core, weights, now)
        update = self._update
        if update is not None and update.weights == weights and not update.is_committed:
            update.is_committed, update.detail = True, "the other workers load the weights"
            self._take(weights)
            effects.append(fx.WeightsChanged(weights=weights))
        return effects

    def _take(self, weights: Weights) -> None:
        self._core.weights = weights
        self._used.append(weights.version)

    def _refused(self, lane: Lane, weights: Weights, detail: str, now: float) -> list[fx.Effect]:
        update, is_new = self._update, detail != lane.weights.refusal
        lane.weights.retry_at, lane.weights.refusal = now + RETRY_SECONDS, detail
        if update is not None and update.weights == weights and not update.is_committed:
            update.end(UpdateState.REFUSED, f"worker {lane.worker} refused: {detail}")
            lane.weights.refusal = ""
        elif not is_new:
            return []
        return [fx.Note(message=f"worker {lane.worker} has not loaded weights {weights.version!r}: {detail}")]

    def tick(self, now: float) -> list[fx.Effect]:
        """Asks workers to load, marks lanes, and reports."""
        self._looked_at = now
        lanes, version = list(self._lanes.values()), self._version
        opened = [lane.phases.weights is LanePhase.OPEN and lane.info.weights_version == version for lane in lanes]
        if self._update is None and all(opened):
            return []
        effects = self._adopt(lanes)
        lanes = [lane for lane in lanes if lane.phases.stays]
        if (update := self._update) is not None:
            self._follow(update, lanes, now)
            if update.state.is_final:
                self._update = None
        for lane in lanes:
            effects += self._advance_lane(lane, lanes, now)
        self._mark(lanes)
        if update is not None:
            updated = sum(lane.info.weights_version == update.weights.version for lane in lanes)
            figures = {"version": update.weights.version, "workers": len(lanes), "workers_updated": updated}
            effects += update.reports(WeightsReport, self._core, now, lambda: figures, updated)
        return effects

    def next_wake(self) -> float | None:
        """Returns when, on the core's clock, the update reports, ends or asks a worker again; None: nothing is due."""
        times = self._update.due_times() if self._update is not None else []
        for lane in self._lanes.values():
            # Only as long as nothing else keeps the lane from loading: it may be drained, or have rows that end first.
            if lane.weights.refusal and lane.weights.retry_at and lane.phases.stays:
                times.append(lane.weights.retry_at)
        # What was due at the last Tick waits for an event, as do a lane that loads and one with requests that finish.
        return min((at for at in times if at > self._looked_at), default=None)

    @property
    def _version(self) -> str:
        return "" if self._core.weights is None else self._core.weights.version

    def _adopt(self, lanes: list[Lane]) -> list[fx.Effect]:
        """Without a journal: takes the weights of a worker that an earlier scheduler has updated."""
        infos = [lane.info for lane in lanes if lane.info.weights_version]
        if self._core.weights is not None or self._update is not None or not infos:
            return []
        weights = Weights(version=infos[0].weights_version, folder=infos[0].weights_folder)
        self._take(weights)
        note = f"worker {lanes[0].worker} has weights {weights.version!r} of an earlier scheduler; all others load them"
        return [fx.Note(message=note), fx.WeightsChanged(weights=weights)]

    def _follow(self, update: Update, lanes: list[Lane], now: float) -> None:
        """Ends the update if it is done or its time is over, and chooses the lane that loads first."""
        is_loading = any(lane.phases.is_loading and lane.weights.ordered == update.weights for lane in lanes)
        behind = [lane for lane in lanes if lane.info.weights_version != update.weights.version]
        if update.state.is_final or is_loading:
            return
        if update.is_committed and all(lane.weights.refusal for lane in behind):
            if not behind:
                update.end(UpdateState.DONE, "all workers have the weights")
            else:
                update.end(UpdateState.INCOMPLETE, f"worker {behind[0].worker}: {behind[0].weights.refusal}")
        elif update.is_late(now):
            update.end(
                UpdateState.TIME_LIMIT,
                f"the time was over; {numbered(len(behind), 'worker')} kept the weights from before",
            )
        elif not update.is_committed and not any(lane.number == update.first for lane in lanes):
            update.num_lost += bool(update.first)
            if update.num_lost == MAX_LOSSES:
                detail = f"{MAX_LOSSES} workers were lost while they loaded the weights"
                update.end(UpdateState.REFUSED, detail)
            elif lanes:
                # No request waits for a worker on standby.
                update.first = min(lanes, key=lambda lane: (lane.rows.num_seated, lane.number)).number

    def _missing(self, lane: Lane) -> Weights | None:
        """The weights that the lane should have and has not."""
        update, wanted = self._update, self._core.weights
        if update is not None and not update.is_committed and lane.number == update.first:
            wanted = update.weights
        return None if wanted is None or lane.info.weights_version == wanted.version else wanted

    def _turn(self, lane: Lane, lanes: list[Lane]) -> Running | None:
        """What the update does with the lane's requests if it is the lane's turn, so that they do not hold it up."""
        update = self._update
        if update is None or lane.phases.on_probation or lane.weights.refusal:
            return None
        is_turn = lane.number == update.first
        if update.is_committed:
            behind = (peer for peer in lanes if self._missing(peer) and peer.phases.counts and not peer.weights.refusal)
            is_turn = not update.in_turn or not lane.phases.counts or lane is next(behind, None)
        return update.running if is_turn else None

    def _advance_lane(self, lane: Lane, lanes: list[Lane], now: float) -> list[fx.Effect]:
        """Asks the lane's worker to load if that is due and the lane is ready."""
        if lane.phases.is_loading:
            return []
        missing = self._missing(lane)
        if missing is None or now < lane.weights.retry_at:
            _empty(lane, missing is not None and lane.phases.on_probation)
            return []
        lane.weights.retry_at = 0.0
        running = self._turn(lane, lanes) or Running.FINISH
        _empty(lane, lane.phases.on_probation or running is not Running.FINISH)
        if lane.in_flight or (running is Running.FINISH and lane.rows.num_seated):
            return []
        keep_rows = running is Running.CONTINUE and bool(lane.rows.num_seated)
        lane.phases.move(LaneMove.LOAD)
        marks = lane.weights
        marks.ordered, marks.until = missing, now + LOAD_SECONDS
        marks.running = Running.CONTINUE if keep_rows else running
        roots = self._config.weights_folders
        return [fx.LoadWeights(worker=lane.worker, weights=missing, roots=roots, keep_rows=keep_rows)]

    def _mark(self, lanes: list[Lane]) -> None:
        """Lets requests start on the lanes with the service's weights, or on all if none of these serves."""
        version = self._version
        has_current = any(
            lane.phases.serves and lane.phases.may_plan and lane.info.weights_version == version for lane in lanes
        )
        for lane in lanes:
            is_current = lane.info.weights_version == version or not has_current
            is_emptied = self._missing(lane) is not None and self._turn(lane, lanes) is not None
            is_open, before = is_current and not is_emptied, lane.phases.weights
            if is_open and before is LanePhase.CLOSED:
                # Requests that no other lane could hold wait apart.
                self._queue.restore_set_aside()
                self._queue.unpark_all()
                lane.phases.move(LaneMove.OPEN)
            elif not is_open and before is LanePhase.OPEN:
                lane.phases.move(LaneMove.CLOSE)


def _empty(lane: Lane, is_due: bool) -> None:
    """Lets the lane make no plans until it loads or, if that is not due, plans again."""
    is_emptying = lane.phases.weights is LanePhase.EMPTYING
    if is_due and not is_emptying:
        lane.phases.move(LaneMove.EMPTY)
    elif is_emptying and not is_due:
        lane.phases.move(LaneMove.CLOSE)


def why_not_allowed(folder: str, roots: Sequence[str]) -> str:
    """Returns why workers may not load from this path, or an empty string. The worker resolves symbolic links."""
    if not folder.startswith("/") or ".." in folder.split("/") or "\0" in folder:
        return f"{folder!r} must be an absolute path without '..'"
    if not any(f"{folder}/".startswith(f"{root.rstrip('/')}/") for root in roots):
        return f"{folder!r} is not in one of the folders of --weights-folders: {', '.join(roots)}"
    return ""
