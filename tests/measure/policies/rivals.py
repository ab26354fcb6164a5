"""Rivals of the core's rules that have no flag: each replaces a part of the core during a run.

Ways to place requests on workers that ignore prefixes and load; and one level of priority for the requests of small
tenants, which the simulator's arrivals lack.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from unittest.mock import patch

import numpy as np

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import prefix_root
from scheduler_svc.core.schedule import placement as core
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import cell, simulation

# The prefix root of tenant 0 in the simulation.
_GREEDY_ROOT = prefix_root(simulation._CACHE_ROOT, "tenant-0")


class Placement(StrEnum):
    """The rule for the worker that a request goes to."""

    ROUND_ROBIN = "round robin"
    RANDOM = "random"
    FIRST_FREE = "first free"
    """The worker that plans next takes the queue's head."""


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Places requests by the rule while the context lasts."""

    def starts_elsewhere(self, lane, request, matched, closed) -> bool:
        lanes = len(self.lanes)
        match placement:
            case Placement.ROUND_ROBIN:
                return lane.number != 1 + request.handle % lanes
            case Placement.RANDOM:
                return lane.number != 1 + int(np.random.default_rng(request.handle).integers(lanes))
            case Placement.FIRST_FREE:
                return False

    with patch.object(core.Placement, "starts_elsewhere", starts_elsewhere):
        yield


class _Prioritising(Scheduler):
    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ev.Submit):
            event = replace(event, priority=int(event.prefix_root != _GREEDY_ROOT))
        return super().handle(event, now)


@contextmanager
def small_tenants_first() -> Iterator[None]:
    """Gives all tenants except the greedy one a level of priority while the context lasts."""
    with patch.object(cell, "Scheduler", _Prioritising):
        yield
