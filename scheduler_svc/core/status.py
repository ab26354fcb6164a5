"""Whether a request that arrives now is computed, and if not, why.

`Availability` is the one truth about health: a pure function of the lanes, the crash loop and the drain, remembered
with the time since which it holds. Front ends, metrics and `Waits` read it.
"""

from dataclasses import dataclass

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages.reports import NotServing, WaitReason, WorkerState
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.lane_phase import LanePhase

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
        self.num_workers = sum([lane.phases.may_start for lane in lanes.serving])
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
        if not lanes:
            if not lanes.last_end:
                return WaitReason.NO_WORKER, NOBODY
            is_lost, what = lanes.last_end
            reason = WaitReason.WORKER_LOST if is_lost else WaitReason.NO_WORKER
            return reason, f"no worker is connected; {what[:_MAX_REASON]}"
        states = [(*state_of(lane), lane.worker) for lane in lanes.values()]
        state, what, worker = min(states, key=lambda cause: _ORDER.index(cause[0]))
        return _REASONS[state], f"worker {worker} {what}"


def _since(before: NotServing | None, cause: tuple[WaitReason, str] | None, now: float) -> NotServing | None:
    """Returns the value for a cause: the same object if nothing has changed."""
    if cause is None or (before is not None and (before.reason, before.message) == cause):
        return None if cause is None else before
    return NotServing(reason=cause[0], message=cause[1], since=now if before is None else before.since)


def state_of(lane: Lane) -> tuple[WorkerState, str]:
    """Returns what a lane's worker does, and a text that continues a sentence about it."""
    phases, version, refusal = lane.phases, lane.weights.ordered.version, lane.weights.refusal
    refused = f"cannot load weights {version!r}: {refusal[:_MAX_REASON]}" if refusal else ""
    if not phases.stays:
        return WorkerState.DRAINING, "is drained"
    if phases.may_start:
        return WorkerState.SERVING, refused
    if refused:
        return WorkerState.REFUSED, refused
    if phases.is_loading:
        return WorkerState.LOADING, f"loads weights {version!r}"
    if phases.weights is not LanePhase.OPEN:
        return WorkerState.LOADING, "has other weights than the service's, and is about to load them"
    if phases.on_probation:
        return WorkerState.STARTING, "has joined and computes its first step"
    return WorkerState.STANDBY, "is on standby"
