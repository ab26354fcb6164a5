"""What a person who waits is told, on stderr: each phase and how long it took, and how far a long one is.

Owns the wall clock; nothing that is simulated knows it.
"""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from scheduler_svc.simulator.simulation import Simulation

_TELL_EVERY_SECONDS = 5.0


def tell(line: str) -> None:
    """A line for whoever waits."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def phase(name: str) -> Generator[None]:
    """Says how long what is inside took, if it went well."""
    begun = time.monotonic()
    yield
    tell(f"{time.monotonic() - begun:8.2f} s  {name}")


class Progress:
    """Of one simulation of so many requests."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._begun = self._told = time.monotonic()

    def __call__(self, simulation: Simulation) -> None:
        """Says something if the last time was long ago."""
        now = time.monotonic()
        if now - self._told < _TELL_EVERY_SECONDS:
            return
        self._told = now
        tally = simulation.tally
        steps = sum(worker.steps for worker in simulation.workers.values())
        ended = tally.finished + tally.rejected
        seconds = now - self._begun
        tell(
            f"{seconds:8.0f} s  {ended / self._num_requests:4.0%}: {ended:,} of {self._num_requests:,} requests ended, "
            f"{tally.live:,} live; {simulation.now:,.0f} s of virtual time, {steps:,} steps"
        )
