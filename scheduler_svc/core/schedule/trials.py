"""Chooses the lane of the current trial, and which requests each plan is for.

At any time one group of suspects runs, on one lane (`suspicion/suspects.py`). On that lane one plan is in flight at a
time: the trial's and those of other requests in turn, so that after a death it is clear which plan ran.

**The lane.** A lane without other requests is preferred, because a death would interrupt them. After a second death a
culprit is likely. If other lanes serve then, the trial has its lane to itself: the other requests on it move to those
lanes at once, and none starts there, unless all suspects still wait for what their worker prepares. If all remaining
lanes are at work, the trial waits up to `PATIENCE_SECONDS` for the dead worker's successor. A trial stays on a lane
that is drained or about to load new weights as long as a member has a row or a plan there, because suspects must never
run on two lanes; no other member starts there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.queue.turns import trial_key
from scheduler_svc.core.schedule.placement import backlog
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane, holds, may_sample
from scheduler_svc.core.state.request import Move, Phase, Request
from scheduler_svc.core.suspicion.suspects import Suspects


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one plan may contain. `EVERYBODY` is the ordinary plan of a lane without a trial."""

    is_trial: bool | None = None
    """True: only suspects run. False: suspects that have rows pause. None: no suspect has a row."""
    suspects: Sequence[Request] = ()
    """The waiting suspects that a plan of the trial may start."""
    uses_cache: bool = False
    """Whether suspects may start from cached pages. They may not once these could be what kills the worker."""
    admits: bool = True
    """Whether other waiting requests may start."""
    stops_at: tuple[int, int] | None = None
    """No request behind this queue key starts, so that a waiting suspect is not overtaken for ever."""
    closed: Lane | None = None
    """The lane that no other request may start on, because a trial has it."""


EVERYBODY = Turn()


PATIENCE_SECONDS = 10.0
"""A worker with a small model is back within some seconds of its death."""


def choose(suspects: Suspects, serving: Sequence[Lane], proven: Sequence[Lane], now: float) -> tuple[Lane | None, Turn]:
    """Chooses the lane that must run the current trial, if one must, and the turn of the other lanes."""
    lane = trial_lane(suspects, serving, now) if len(suspects) else None
    if lane is None or not is_apart(suspects, lane, proven):
        return lane, EVERYBODY
    return lane, Turn(closed=lane)


def trial_lane(suspects: Suspects, serving: Sequence[Lane], now: float) -> Lane | None:
    """Chooses the lane that must run the current trial, None without a trial or if it must wait."""
    proven = [lane for lane in serving if lane.phases.may_start]
    trial = suspects.next_trial(lambda request: any(holds(lane, request) for lane in proven))
    if trial is None:
        return None
    members = suspects.members()
    if suspects.is_running():
        return next((lane for lane in serving if lane.worker == trial.worker), None)
    fitting = [lane for lane in proven if any(holds(lane, request) for request in members)]
    if not fitting:
        return None

    def key(lane: Lane) -> tuple[bool, bool, bool, int, int]:
        is_busy, is_last = lane.rows.num_seated > 0, lane.worker == suspects.last_worker
        return lane.is_overdue(now), is_busy, not is_last, backlog(lane), lane.number

    best = min(fitting, key=key)
    lost_at, num_lanes = suspects.last_loss
    is_short = len(proven) < num_lanes and now < lost_at + PATIENCE_SECONDS
    if best.rows.num_seated and is_short and suspects.is_repeated():
        # The dead worker will soon be replaced. Until then the trial spares the remaining lanes.
        suspects.waits_until = lost_at + PATIENCE_SECONDS
        return None
    suspects.begin_on(best)
    return best


def is_apart(suspects: Suspects, lane: Lane, proven: Sequence[Lane]) -> bool:
    """Returns whether the trial has its lane to itself: not while it only waits for what its members need."""
    if len(proven) < 2 or not suspects.is_repeated():
        return False
    return any(request.phase is not Phase.WAITING or may_sample(lane, request) for request in suspects.members())


def move_others(lane: Lane, queue: RequestQueue, other_lanes: Sequence[Lane], counters: Counters) -> None:
    """Preempts the rows of a trial's lane, without plans in flight, that other lanes can run."""
    for request in lane.rows.requests_at(lane.rows.seated()):
        known = int(lane.rows.known[request.row])
        if not queue.is_held(request) and any(holds(other, request, known) for other in other_lanes):
            counters.preemptions += 1
            lane.unseat(request, Move.PREEMPT)
            queue.enqueue(request)


def trial_starts(suspects: Suspects, lane: Lane) -> list[Request]:
    """Returns the suspects of the current trial that may start on its lane, in order."""
    members = suspects.members() if lane.phases.may_start else []
    return [request for request in members if request.phase is Phase.WAITING and holds(lane, request)]


def turns(suspects: Suspects, lane: Lane, other_lanes: Sequence[Lane]) -> list[Turn]:
    """Returns the turns of the trial lane's next plan, in the order in which they are tried."""
    if suspects.trial is None:
        return [EVERYBODY]
    waiting = trial_starts(suspects, lane)
    trial = Turn(is_trial=True, suspects=waiting, uses_cache=suspects.may_use_cache())
    rest = Turn(
        is_trial=False,
        admits=not is_apart(suspects, lane, [lane, *other_lanes]),
        # Others may overtake a suspect for which the lane prepares something.
        stops_at=min((trial_key(request) for request in waiting if may_sample(lane, request)), default=None),
    )
    if not suspects.lacks_control():
        return [trial, rest] if suspects.is_next else [rest, trial]
    # Another request must get a token before a lone suspect may be met by a second death.
    if any(other.in_flight for other in other_lanes):
        return [rest]
    return [rest, trial]
