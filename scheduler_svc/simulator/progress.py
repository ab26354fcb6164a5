"""Progress lines on stderr: each phase and how long it took, and how far a long simulation has come.

Owns the wall clock. Nothing that is simulated reads it.
"""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from scheduler_svc.simulator.simulation import Simulation

_SECONDS_BETWEEN_LINES = 5.0


def note(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def phase(name: str) -> Generator[None]:
    """Prints how long the phase took, unless it raised."""
    begun = time.monotonic()
    yield
    note(f"{time.monotonic() - begun:8.2f} s  {name}")


class Progress:
    """The progress of one simulation of `num_requests` requests."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._begun = self._noted = time.monotonic()

    def __call__(self, simulation: Simulation) -> bool:
        """Prints a line if the last one is old enough. Returns True, so that the simulation continues."""
        now = time.monotonic()
        if now - self._noted < _SECONDS_BETWEEN_LINES:
            return True
        self._noted = now
        tally = simulation.tally
        steps = sum(worker.steps for worker in simulation.workers.values())
        ended = tally.finished + tally.rejected
        seconds = now - self._begun
        note(
            f"{seconds:8.0f} s  {ended / self._num_requests:4.0%}: {ended:,} of {self._num_requests:,} requests ended, "
            f"{tally.live:,} live; {simulation.now:,.0f} s of virtual time, {steps:,} steps"
        )
        return True
