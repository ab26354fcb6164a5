"""Takes up the pages that a worker kept while it had no scheduler, or was given up.

A worker has labels of its pages (`pages/page_labels.py`). When it joins, it reports those whose pages were not written
since. They become cached pages of its new lane if they belong to the same root of page hashes and no plan of a newer
generation than the lane's can have changed them. A core continues the root and the generations of an earlier one only
with that one's journal, and only such a core gives the root a name.
"""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.page_labels import KeptPages
from scheduler_svc.core.state.lane import Lane


def accept(lane: Lane, kept: KeptPages | None, config: CoreConfig) -> list[fx.Effect]:
    """Gives a new lane the pages that its worker has kept. Returns the answer to the worker, and a note."""
    if not config.page_root:
        return [fx.WorkerAccepted(worker=lane.worker, generation=lane.generation)]
    lane.pages.labels.turn_on()
    keeps_pages = kept is not None and _agrees(lane, kept, config)
    accepted = fx.WorkerAccepted(
        worker=lane.worker, generation=lane.generation, page_root=config.page_root, keeps_pages=keeps_pages
    )
    if kept is None or not keeps_pages:
        return [accepted]
    labels = kept.labels
    lane.pool.restore(labels.pages.tolist(), labels.hashes, labels.tokens)
    return [accepted, fx.Note(message=f"worker {lane.worker} has kept {lane.pool.num_cached} pages")]


def _agrees(lane: Lane, kept: KeptPages, config: CoreConfig) -> bool:
    """Whether the labels were made by this core or by one that it continues, and are not older than the pages."""
    # A copy of the journal may be older than the worker's newest plan.
    return kept.page_root == config.page_root and kept.generation < lane.generation
