"""Ways to place requests on workers that ignore prefixes and load, as rivals of the core's placement.

Owns the replacement of `placement.is_better_elsewhere` during a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import numpy as np

from scheduler_svc.core.schedule import placement as routing


class Placement(StrEnum):
    """The rule for the worker that a request goes to."""

    ROUND_ROBIN = "round robin"
    RANDOM = "random"
    FIRST_FREE = "first free"
    """The worker that plans next takes the queue's head."""


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Places requests by the rule while the context lasts."""
    original = routing.is_better_elsewhere

    def is_better_elsewhere(lane, request, begin, rivals, left) -> bool:
        lanes = 1 + len(rivals)
        match placement:
            case Placement.ROUND_ROBIN:
                return lane.number != 1 + request.handle % lanes
            case Placement.RANDOM:
                return lane.number != 1 + int(np.random.default_rng(request.handle).integers(lanes))
            case Placement.FIRST_FREE:
                return False

    routing.is_better_elsewhere = is_better_elsewhere
    try:
        yield
    finally:
        routing.is_better_elsewhere = original
