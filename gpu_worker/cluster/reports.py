"""What is known of a worker on its node, as it travels to `status`, and as text. Knows nothing of Ray."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class State(StrEnum):
    """Of a worker's process, and of its place in the cluster."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "pausing"
    GIVEN_UP = "given up"
    STOPPED = "stopped"
    # Known by the cluster and not by a supervisor.
    WAITING = "waiting"
    MOVING = "moving"
    BROKEN = "broken"


# `up` waits for a change of the others.
FAILED_STATES = frozenset({State.GIVEN_UP, State.BROKEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One worker."""

    number: int
    state: State
    host: str = ""
    pid: int = 0
    """0 if no process runs."""
    num_starts: int = 0
    seconds: float = 0.0
    """For how long it has been in this state."""
    cause: str = ""
    """Why it last ended, or why it is not there."""
    last_line: str = ""

    def plain(self) -> dict[str, Any]:
        """Strings and numbers alone."""
        return {**asdict(self), "state": str(self.state)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Self:
        """The report of what `plain` returned."""
        return cls(**{**plain, "state": State(plain["state"])})


def line_of(report: Report) -> str:
    """One line about a worker, for people."""
    where = f" on {report.host}" if report.host else ""
    pid = f", pid {report.pid}" if report.pid else ""
    starts = f", start {report.num_starts}" if report.num_starts > 1 else ""
    about = report.cause if report.state != State.STARTING else report.cause or report.last_line
    tail = f": {about}" if about else ""
    return f"worker {report.number}{where}: {report.state} for {duration(report.seconds)}{pid}{starts}{tail}"


def summary_of(reports: Sequence[Report]) -> str:
    """One line about all of them."""
    num_serving = sum(report.state == State.SERVING for report in reports)
    return f"{num_serving} of {len(reports)} workers serve"


def duration(seconds: float) -> str:
    """`3 s`, `12 min`, `5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
