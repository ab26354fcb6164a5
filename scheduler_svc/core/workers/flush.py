"""Empties the prefix cache of all workers."""

from scheduler_svc.core.workers.lanes import Lanes


def flush(lanes: Lanes) -> int:
    """Evicts all cached pages, also those of lost workers, and returns their number."""
    count = lanes.held_pools.evict_all()
    for lane in lanes.by_worker.values():
        lane.schedule.clear_lookups()
        lane.pages.labels.forget()
        count += lane.pool.evict_all() + lane.host.evict_all()
    return count
