"""Takes up the pages that a worker kept while it had no scheduler, or was given up.

A worker has labels of its pages (`state/page_labels.py`). When it joins, it reports those whose pages were not written
since. They become cached pages of its new lane if they belong to the same root of page hashes, and no generation of
this lane's worker can be newer than the lane. A core continues the root and the generations of an earlier one only with
that one's journal, and only such a core gives the root a name.
"""

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.page_labels import KeptPages
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane


def take_up(lane: Lane, kept: KeptPages | None, config: CoreConfig, counters: Counters) -> bool:
    """Gives a new lane the pages that its worker has kept. Returns False if the worker is to zero its pool instead."""
    if kept is None or not config.page_root or kept.page_root.hex() != config.page_root:
        return False
    if kept.generation >= lane.generation:
        # A copy of the journal that is older than the worker's newest plan.
        return False
    labels = kept.labels
    lane.pool.restore(labels.pages.tolist(), labels.hashes, labels.tokens)
    counters.pages_taken_up(lane.pool.num_cached)
    return True
