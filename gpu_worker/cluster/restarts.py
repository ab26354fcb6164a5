"""Decides whether a worker that ended is started again on its node, and after which pause.

Does no I/O; time and randomness are arguments.
"""

import random
from dataclasses import dataclass, field

# The worker's exit code for wrong settings: files that its node lacks, flags that it does not know.
WRONG_SETTINGS = 2
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 30.0
# A worker that served for so long was no failure of its settings, its model or its machine.
STEADY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It is not started again; `why` says so to people."""

    why: str


@dataclass(slots=True, kw_only=True)
class Restarts:
    """Pauses that double from 0.1 s to 30 s, with jitter; gives up after `max_failures` failures in a row."""

    max_failures: int
    rng: random.Random = field(default_factory=random.Random)
    num_failures: int = 0
    """Failures in a row: ends of workers that had not served for STEADY_SECONDS."""

    def decide(self, *, status: int, served_seconds: float) -> float | GiveUp:
        """Returns the pause in seconds before the next start, or GiveUp.

        status: the exit status, negative for a signal. served_seconds: since it joined, 0 if it never did.
        """
        if status == 0:
            # It was drained, or somebody stopped it.
            self.num_failures = 0
            return 0.0
        if status == WRONG_SETTINGS and not served_seconds:
            return GiveUp("its settings are refused on this node")
        self.num_failures = 1 if served_seconds >= STEADY_SECONDS else self.num_failures + 1
        if self.num_failures >= self.max_failures:
            return GiveUp(f"it failed {self.num_failures} times in a row")
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** (self.num_failures - 1), _LAST_PAUSE_SECONDS)
        return pause * self.rng.uniform(0.5, 1.0)
