"""Ways to place requests on workers that ignore prefixes and load, as rivals of the core's placement.

Owns the replacement of `OtherLanes.start_sooner` during a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import numpy as np

from scheduler_svc.core.schedule.placement import OtherLanes


class Placement(StrEnum):
    """The rule for the worker that a request goes to."""

    ROUND_ROBIN = "round robin"
    RANDOM = "random"
    FIRST_FREE = "first free"
    """The worker that plans next takes the queue's head."""


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Places requests by the rule while the context lasts."""
    original = OtherLanes.start_sooner

    def start_sooner(self, lane, request, begin) -> bool:
        lanes = 1 + len(self._lanes)
        match placement:
            case Placement.ROUND_ROBIN:
                return lane.number != 1 + request.handle % lanes
            case Placement.RANDOM:
                return lane.number != 1 + int(np.random.default_rng(request.handle).integers(lanes))
            case Placement.FIRST_FREE:
                return False

    OtherLanes.start_sooner = start_sooner
    try:
        yield
    finally:
        OtherLanes.start_sooner = original
