"""The phases of a lane: what may happen on it now, and the moves that change that.

A lane is in three phases at once. Its *seat* says whether requests run on the worker, its *stay* whether the worker is
to go, its *weights* whether requests start with the weights that it has. They are three because they are independent: a
worker on probation may be drained, one that is drained may be proven, and one that loads weights may be seated,
drained or dismissed before it answers. One phase for all would have 30 values for the same rules.

`LANE_TRANSITIONS` lists all moves. Each changes one of the three phases. What code asks of a lane in every step is
stored in `LanePhases` and changes only with a move.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class LanePhase(StrEnum):
    """The phases: first those of the seat, then those of the stay and of the weights."""

    PROBATION = "probation"
    """The worker's first step is not confirmed. Then it serves."""
    STANDBY_PROBATION = "standby probation"
    """The same of a worker that joined on standby."""
    STANDBY = "standby"
    """It gets requests when another worker is lost or drained."""
    SERVING = "serving"
    REPLACED = "replaced"
    """It is drained, and a standby worker has its seat already. Its rows run until they move."""

    STAYING = "staying"
    DRAINING = "draining"
    """No request starts. Rows run until they move, end, or the lane is closed."""
    HANDING_OVER = "handing over"
    """It makes no plans: a standby worker takes its pool over once the plans in flight are answered."""
    DISMISSED = "dismissed"
    """The worker was asked to end."""

    OPEN = "open"
    CLOSED = "closed"
    """No request starts, because others have the service's weights, or because its own requests end before it loads."""
    EMPTYING = "emptying"
    """It makes no plans: it loads once those in flight are answered, or when a refusal is old enough."""
    LOADING = "loading"
    """The worker was asked to load and has not answered. A lane that is drained never begins to."""


class LaneMove(StrEnum):
    """The transitions between phases."""

    PROVE = "prove"
    SEAT = "seat"
    REPLACE = "replace"

    DRAIN = "drain"
    HAND_OVER = "hand over"
    STAY = "stay"
    DISMISS = "dismiss"

    OPEN = "open"
    CLOSE = "close"
    EMPTY = "empty"
    LOAD = "load"
    ANSWER = "answer"


# Any other combination is a bug and raises AssertionError. A lane that is lost is dropped in any phase.
LANE_TRANSITIONS: dict[tuple[LanePhase, LaneMove], LanePhase] = {
    (LanePhase.PROBATION, LaneMove.PROVE): LanePhase.SERVING,
    (LanePhase.STANDBY_PROBATION, LaneMove.PROVE): LanePhase.STANDBY,
    (LanePhase.STANDBY, LaneMove.SEAT): LanePhase.SERVING,
    (LanePhase.SERVING, LaneMove.REPLACE): LanePhase.REPLACED,
    # A worker that was asked to stop stays after all.
    (LanePhase.REPLACED, LaneMove.SEAT): LanePhase.SERVING,
    (LanePhase.STAYING, LaneMove.DRAIN): LanePhase.DRAINING,
    (LanePhase.DRAINING, LaneMove.HAND_OVER): LanePhase.HANDING_OVER,
    # The standby worker was lost.
    (LanePhase.HANDING_OVER, LaneMove.DRAIN): LanePhase.DRAINING,
    (LanePhase.DRAINING, LaneMove.STAY): LanePhase.STAYING,
    (LanePhase.HANDING_OVER, LaneMove.STAY): LanePhase.STAYING,
    (LanePhase.DRAINING, LaneMove.DISMISS): LanePhase.DISMISSED,
    (LanePhase.HANDING_OVER, LaneMove.DISMISS): LanePhase.DISMISSED,
    (LanePhase.OPEN, LaneMove.CLOSE): LanePhase.CLOSED,
    (LanePhase.EMPTYING, LaneMove.CLOSE): LanePhase.CLOSED,
    (LanePhase.CLOSED, LaneMove.OPEN): LanePhase.OPEN,
    (LanePhase.OPEN, LaneMove.EMPTY): LanePhase.EMPTYING,
    (LanePhase.CLOSED, LaneMove.EMPTY): LanePhase.EMPTYING,
    (LanePhase.OPEN, LaneMove.LOAD): LanePhase.LOADING,
    (LanePhase.CLOSED, LaneMove.LOAD): LanePhase.LOADING,
    (LanePhase.EMPTYING, LaneMove.LOAD): LanePhase.LOADING,
    (LanePhase.LOADING, LaneMove.ANSWER): LanePhase.CLOSED,
}


@dataclass(slots=True)
class LanePhases:
    """The phases of one lane, and what follows from them."""

    seat: LanePhase
    stay: LanePhase = LanePhase.STAYING
    weights: LanePhase = LanePhase.OPEN
    on_probation: bool = field(init=False)
    """Whether the worker's first step is not confirmed."""
    counts: bool = field(init=False)
    """Whether the worker is not on standby: it counts in the load, and no standby worker is needed in its place."""
    serves: bool = field(init=False)
    """Whether requests run on the worker. True also while it is drained or loads."""
    stays: bool = field(init=False)
    """Whether the worker is not drained."""
    is_loading: bool = field(init=False)
    may_plan: bool = field(init=False)
    """Whether plans are made: of rows, or the one of the probation."""
    may_start: bool = field(init=False)
    """Whether requests may start."""

    def __post_init__(self) -> None:
        self._derive()

    def move(self, move: LaneMove) -> None:
        """Makes a transition. Raises AssertionError if `LANE_TRANSITIONS` does not contain it."""
        before = self.seat, self.stay, self.weights
        after = [LANE_TRANSITIONS.get((phase, move)) for phase in before]
        assert any(after), f"{move} while {', '.join(before)}"
        self.seat, self.stay, self.weights = (to or phase for to, phase in zip(after, before, strict=True))
        self._derive()

    def _derive(self) -> None:
        seat, stay, weights = self.seat, self.stay, self.weights
        self.on_probation = seat in (LanePhase.PROBATION, LanePhase.STANDBY_PROBATION)
        self.counts = seat not in (LanePhase.STANDBY_PROBATION, LanePhase.STANDBY)
        self.serves = seat in (LanePhase.SERVING, LanePhase.REPLACED)
        self.stays, self.is_loading = stay is LanePhase.STAYING, weights is LanePhase.LOADING
        # A lane that is drained is not emptied for weights which it never loads.
        is_held = self.is_loading or (self.stays and weights is LanePhase.EMPTYING)
        may_run = seat is not LanePhase.STANDBY and stay in (LanePhase.STAYING, LanePhase.DRAINING)
        self.may_plan = may_run and not is_held
        self.may_start = seat is LanePhase.SERVING and self.stays and weights is LanePhase.OPEN
