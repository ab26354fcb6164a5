"""Whose plan a lane makes while requests are suspected: the trial's, the other requests', or everybody's."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


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
NO_STARTS = Turn(admits=False)
"""The plan of a lane whose worker is drained."""
