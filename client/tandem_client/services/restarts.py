"""Decides whether an ended child process is started again, and after which pause.

Does no I/O; time and randomness are arguments.
"""

import random
from collections import deque
from dataclasses import dataclass, field

# Both programs exit with this code if their settings are wrong. After a child has served, the code does not mean that:
# the port may be taken for a moment.
WRONG_SETTINGS = 2


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the child again; `why` continues a sentence about its end."""

    why: str
    wrong_settings: bool = False
    in_order: bool = False


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Pauses that double, with jitter; gives up where a restart cannot help.

    A child that served for `steady_seconds`, and for as long as its start took, starts again at once. Such starts take
    at most half of the time. A child that never served is not restarted, if `needs_service`: its settings, model or
    machine are at fault. A crash loop is `max_ends` ends within `window_seconds`.
    """

    needs_service: bool = True
    # Whether an end with status 0 is wanted, so that the child is not started again.
    ends_in_order: bool = False

    # None: a crash loop goes on, because something else reports it.
    max_ends: int | None = 5
    window_seconds: float = 60.0
    first_pause_seconds: float = 0.5
    last_pause_seconds: float = 30.0
    steady_seconds: float = 3.0
    rng: random.Random = field(default_factory=random.Random)
    _pause_seconds: float = field(default=0.0, init=False)
    _ends: deque[float] = field(default_factory=deque[float], init=False)

    def decide(
        self, *, at: float, status: int, ever_served: bool, start_seconds: float, served_seconds: float
    ) -> float | GiveUp:
        """Returns the pause in seconds before the child is started again, or why it is not.

        `at` is the time of the end on a monotonic clock; ends are given in order of time. `status` is the exit status,
        negative for a signal. `ever_served`: the child, or an earlier one in its place, served at some time.
        `start_seconds`: how long this child took until it served. `served_seconds`: how long it served; 0 if it did
        not.
        """
        if status == 0 and ever_served:
            # It was drained, or somebody stopped it: no crash.
            self._pause_seconds = 0.0
            return GiveUp(" because it was drained", in_order=True) if self.ends_in_order else 0.0
        if self.needs_service and not ever_served:
            wrong_settings = status == WRONG_SETTINGS
            return GiveUp("" if wrong_settings else " before it served", wrong_settings=wrong_settings)
        self._ends.append(at)
        while self._ends[0] <= at - self.window_seconds:
            self._ends.popleft()
        if self.max_ends is not None and len(self._ends) >= self.max_ends:
            times = f", {len(self._ends)} times within {self.window_seconds:g} s" if self.max_ends > 1 else ""
            return GiveUp(f"{times}; it is not started again")
        if served_seconds >= max(self.steady_seconds, start_seconds):
            self._pause_seconds = 0.0
            return 0.0
        return self._next_pause()

    def _next_pause(self) -> float:
        """Returns the pause, and doubles it for the next end."""
        pause_seconds = self._pause_seconds or self.first_pause_seconds
        self._pause_seconds = min(2 * pause_seconds, self.last_pause_seconds)
        # A random factor spreads the restarts of several services that ended at the same time.
        return pause_seconds * self.rng.uniform(0.5, 1.0)
