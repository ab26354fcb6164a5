"""Requests of the small tenants come with a step of priority, which the simulator's arrivals do not have.

Owns the core that stands in for the simulation's while a run lasts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import prefix_root
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import simulation

# What the simulation calls tenant 0.
_GREEDY_ROOT = prefix_root(simulation._CACHE_ROOT, "tenant-0")


class _Prioritising(Scheduler):
    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ev.Submit):
            event = replace(event, priority=int(event.prefix_root != _GREEDY_ROOT))
        return super().handle(event, now)


@contextmanager
def small_tenants_first() -> Iterator[None]:
    """All but the greedy tenant have a step of priority."""
    original = simulation.Scheduler
    simulation.Scheduler = _Prioritising
    try:
        yield
    finally:
        simulation.Scheduler = original
