"""Ways to spread requests over workers that look at nothing, to compare the core's routing with.

Owns what stands in for `OtherLanes.start_sooner` while a run lasts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import numpy as np

from scheduler_svc.core.schedule.placement import OtherLanes


class Placement(StrEnum):
    """Decided when a request comes, but for `FIRST_FREE`."""

    ROUND_ROBIN = "round robin"
    RANDOM = "random"
    FIRST_FREE = "first free"
    """Whichever worker plans next takes the queue's head."""


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Requests go where it says."""
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
