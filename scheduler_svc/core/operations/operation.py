"""What a drain and an update of weights have in common: each goes on for a while, and operators watch it.

`Operation` owns the state of one, its watchers, and when reports are due: at once for a new watcher, then once
a second and at each change, until its end. It goes on if its operators leave or their front end dies. Knows nothing of
what is done.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from scheduler_svc.core.core import Core
from scheduler_svc.core.messages.operators import StartOperation
from scheduler_svc.core.messages.reports import OperationState

_State = TypeVar("_State", bound=OperationState)
_Report = TypeVar("_Report")

MAX_WATCHERS = 64
"""Operators that watch all drains, or the update of weights."""
REPORT_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Operation(Generic[_State]):
    """One operation, from its beginning to its last report. Times are on the core's clock."""

    state: _State
    detail: str = ""
    """What it waits for, or how it ended, in one sentence."""
    began_at: float
    ends_at: float | None = None
    """When its time is over."""
    # Front end and query of each operator, and of those without a report so far.
    _watchers: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    _new: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    _reports_at: float = 0.0
    _reported: object = None

    def is_late(self, now: float) -> bool:
        """Whether its time is over."""
        return self.ends_at is not None and now >= self.ends_at

    @property
    def num_watchers(self) -> int:
        """Operators that watch; some may be gone."""
        return len(self._watchers)

    def end(self, state: _State, detail: str) -> None:
        """Ends it; the reports that are due next are the last ones."""
        self.state, self.detail = state, detail

    def watch(self, event: StartOperation, ends_at: float | None) -> None:
        """Adds an operator. The earliest time that one of them has set ends the operation."""
        self._watchers.add((event.frontend, event.query))
        self._new.add((event.frontend, event.query))
        if ends_at is not None and (self.ends_at is None or ends_at < self.ends_at):
            self.ends_at = ends_at

    def leave(self, event: StartOperation) -> None:
        """Removes an operator that has stopped watching."""
        self._watchers.discard((event.frontend, event.query))

    def reports(
        self,
        report: Callable[..., _Report],
        core: Core,
        now: float,
        figures: Callable[[], dict[str, Any]],
        *seen: object,
    ) -> list[_Report]:
        """Makes the reports that are due, and forgets operators that are gone. `seen`: what else is a change.

        `figures` returns the fields that only this kind of operation has.
        """
        self._watchers = {watcher for watcher in self._watchers if watcher[0] in core.frontends}
        new, self._new = self._new & self._watchers, set()
        change, due = (self.state, *seen), self._watchers
        if now < self._reports_at and change == self._reported:
            due = new
        elif due:
            self._reports_at, self._reported = now + REPORT_SECONDS, change
        if not due:
            return []
        if self.state.is_final:
            self._watchers = set()
        waiting = core.queue.num_waiting
        values = figures() | {"state": self.state, "detail": self.detail, "seconds": now - self.began_at}
        values |= {"running": len(core.queue) - waiting, "waiting": waiting}
        return [report(frontend=frontend, query=query, **values) for frontend, query in sorted(due)]

    def due_times(self) -> list[float]:
        """When something is due though no event comes."""
        times = [self._reports_at] if self._watchers else []
        return times if self.ends_at is None or self.state.is_final else [*times, self.ends_at]


def why_not_watched(operations: Iterable[Operation[Any]], what: str) -> str:
    """Returns why no further operator may watch, or an empty string."""
    is_full = sum(operation.num_watchers for operation in operations) >= MAX_WATCHERS
    return f"{MAX_WATCHERS} callers watch {what}; this is the limit" if is_full else ""
