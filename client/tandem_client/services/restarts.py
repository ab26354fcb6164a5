"""When an ended child process is started again, and after which pause.

Pure: ends in, decisions out; time and randomness are arguments.
"""

import random
from collections import deque
from dataclasses import dataclass, field

# Both programs exit with it when their settings are wrong. Settings that once served may meet a port that is taken for
# a moment, so it means this only before a child has served.
WRONG_SETTINGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One unexpected end of a child."""

    # Monotonic clock, in seconds.
    at: float
    # As in subprocess: negative is the signal that ended it.
    status: int
    # Whether the child, or one before it in its place, ever served.
    ever_served: bool
    # How long this very child had served.
    served_seconds: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the child again; `why` continues a sentence about its end."""

    why: str
    wrong_settings: bool = False


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Pauses that double, with jitter; gives up where a restart cannot help.

    A child that never served is not restarted: its settings, model or machine are at fault. A crash loop is
    `max_ends` ends within `window_seconds`.
    """

    # None: a crash loop is not given up, because something else reports it.
    max_ends: int | None = 5
    window_seconds: float = 60.0
    first_pause_seconds: float = 0.5
    last_pause_seconds: float = 30.0
    # A child that served this long starts with the first pause again.
    steady_seconds: float = 60.0
    rng: random.Random = field(default_factory=random.Random)
    _pause_seconds: float = field(default=0.0, init=False)
    _ends: deque[float] = field(default_factory=deque[float], init=False)

    def decide(self, end: End) -> Restart | GiveUp:
        """What to do about an end. Ends are given in order of time."""
        if not end.ever_served:
            wrong_settings = end.status == WRONG_SETTINGS
            return GiveUp("" if wrong_settings else " before it served", wrong_settings=wrong_settings)
        self._ends.append(end.at)
        while self._ends[0] <= end.at - self.window_seconds:
            self._ends.popleft()
        if self.max_ends is not None and len(self._ends) >= self.max_ends:
            times = f", {len(self._ends)} times within {self.window_seconds:g} s" if self.max_ends > 1 else ""
            return GiveUp(times)
        return Restart(self._next_pause(end.served_seconds))

    def _next_pause(self, served_seconds: float) -> float:
        if not self._pause_seconds or served_seconds >= self.steady_seconds:
            self._pause_seconds = self.first_pause_seconds
        # Between half and the whole of it, so that services that fell together do not rise together.
        pause_seconds = self._pause_seconds * self.rng.uniform(0.5, 1.0)
        self._pause_seconds = min(2 * self._pause_seconds, self.last_pause_seconds)
        return pause_seconds
