"""Ways to place requests on workers that ignore prefixes and load, as rivals of the core's placement.

Owns the replacement of the core's `Placement.starts_elsewhere` during a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import numpy as np

from scheduler_svc.core.schedule import placement as core


class Placement(StrEnum):
    """The rule for the worker that a request goes to."""

    ROUND_ROBIN = "round robin"
    RANDOM = "random"
    FIRST_FREE = "first free"
    """The worker that plans next takes the queue's head."""


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Places requests by the rule while the context lasts."""
    original = core.Placement.starts_elsewhere

    def starts_elsewhere(self, lane, request, matched, closed) -> bool:
        lanes = len(self.lanes)
        match placement:
            case Placement.ROUND_ROBIN:
                return lane.number != 1 + request.handle % lanes
            case Placement.RANDOM:
                return lane.number != 1 + int(np.random.default_rng(request.handle).integers(lanes))
            case Placement.FIRST_FREE:
                return False

    core.Placement.starts_elsewhere = starts_elsewhere
    try:
        yield
    finally:
        core.Placement.starts_elsewhere = original
