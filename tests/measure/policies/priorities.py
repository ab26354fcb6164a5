"""Gives the requests of small tenants one level of priority, which the simulator's arrivals lack.

Owns the scheduler that replaces the simulation's during a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import prefix_root
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import simulation

# The prefix root of tenant 0 in the simulation.
_GREEDY_ROOT = prefix_root(simulation._CACHE_ROOT, "tenant-0")


class _Prioritising(Scheduler):
    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ev.Submit):
            event = replace(event, priority=int(event.prefix_root != _GREEDY_ROOT))
        return super().handle(event, now)


@contextmanager
def small_tenants_first() -> Iterator[None]:
    """Gives all tenants except the greedy one a level of priority while the context lasts."""
    original = simulation.Scheduler
    simulation.Scheduler = _Prioritising
    try:
        yield
    finally:
        simulation.Scheduler = original
