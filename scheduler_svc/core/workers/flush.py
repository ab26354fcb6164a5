"""Empties the prefix cache of all workers."""

from collections.abc import Iterable

from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.workers.held_pools import HeldPools


def flush(lanes: Iterable[Lane], held_pools: HeldPools) -> int:
    """Evicts all cached pages, also those of lost workers, and returns their number."""
    count = held_pools.evict_all()
    for lane in lanes:
        lane.schedule.clear_lookups()
        lane.labels.forget()
        count += lane.pool.evict_all() + lane.host.evict_all()
    return count
