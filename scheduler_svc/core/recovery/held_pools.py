"""The page pools that outlive lost workers, until another worker takes them over.

A worker may share the memory of its KV pool with a holder process (`WorkerInfo.pool_id`). If the worker dies or hangs,
its lane's page pool is kept here, with the cached pages of confirmed steps; no row holds a page of it. A lane with the
same layout that begins to serve takes it over: its next plan names the pool, and the worker maps that memory in place
of its own. If the worker answers that it could not, or finds a page damaged, the lane evicts all pages and computes
them again.

A pool is dropped after `HOLD_SECONDS`, or if more than `MAX_HELD` are kept.

**Pages of a worker that joins.** A worker has labels of its pages (`pages/lane_pages.py`). When it joins, it reports
those of pages that were not written since. They become cached pages of its new lane if they belong to the same root of
page hashes and no plan of a newer generation than the lane's can have changed them. A core continues the root and the
generations of an earlier one only with that one's journal, and only such a core gives the root a name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import KeptPages, TakeOver
from scheduler_svc.core.messages.reports import HeldPoolsLoad
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.pages.page_pool import PagePool
from scheduler_svc.core.state.lane import Lane
from tandem_contract.plural import numbered

HOLD_SECONDS = 300.0
"""The holder keeps the memory of an unused pool for longer than this."""
MAX_HELD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPool:
    """The pages of a lost worker. `take_over` goes to the next worker; it is dropped at `until` by the core's clock."""

    take_over: TakeOver
    pages: PagePool
    info: WorkerInfo
    until: float


class HeldPools:
    """Pools by id, in the order in which their workers were lost."""

    def __init__(self) -> None:
        self._held: dict[bytes, HeldPool] = {}
        self._num_taken_over = 0
        self._num_pages_kept = 0
        self.num_damaged = 0
        """Pages that workers found damaged."""

    @property
    def pools(self) -> tuple[HeldPool, ...]:
        return tuple(self._held.values())

    def keep(self, lane: Lane, pool_id: bytes, now: float) -> None:
        """Keeps the page pool of a lane that was reset because its worker is lost, if a page of it is cached.

        `pool_id` names the pool that the worker had at its loss.
        """
        if not pool_id or not lane.pool.num_cached:
            return
        self._held.pop(pool_id, None)
        # A lane with a worker that never heard of the pool has not written to it.
        take_over = lane.pages.pending or TakeOver(pool_id=pool_id, generation=lane.generation)
        self._held[pool_id] = HeldPool(
            take_over=take_over,
            pages=lane.pool,
            info=lane.info,
            until=now + HOLD_SECONDS,
        )
        if len(self._held) > MAX_HELD:
            del self._held[next(iter(self._held))]

    def hand_over(self, lane: Lane, now: float) -> None:
        """Gives a lane without rows and cached pages the pool of the worker that was lost last, if one fits."""
        self.expire(now)
        if lane.rows.num_seated or lane.in_flight or lane.pool.num_cached:
            return
        for pool_id, held in reversed(self._held.items()):
            if fits(held.info, lane.info):
                del self._held[pool_id]
                lane.take_over(held.pages, held.take_over)
                return

    def answered(self, lane: Lane, *, ok: bool) -> None:
        """Counts the answer of a worker that was asked to take a pool over."""
        self._num_taken_over += ok
        self._num_pages_kept += lane.pages.num_taken_over if ok else 0

    def load(self, now: float) -> HeldPoolsLoad:
        """Returns what is held at `now`, and the counts since the start."""
        pools = [held for held in self._held.values() if now < held.until]
        return HeldPoolsLoad(
            pools=len(pools),
            pages=sum(held.pages.num_cached for held in pools),
            bytes=sum(held.info.pool_bytes for held in pools),
            taken_over=self._num_taken_over,
            pages_kept=self._num_pages_kept,
            damaged_pages=self.num_damaged,
        )

    def forget(self, pool_id: bytes, lanes: Iterable[Lane]) -> None:
        """Drops the pool, because a worker that uses its memory has joined, also from lanes that would take it over."""
        self._held.pop(pool_id, None)
        for lane in lanes:
            if lane.pages.pending is not None and lane.pages.pending.pool_id == pool_id:
                lane.pages.drop_take_over()

    def expire(self, now: float) -> None:
        """Drops the pools that were kept for `HOLD_SECONDS`."""
        for pool_id in [pool_id for pool_id, held in self._held.items() if now >= held.until]:
            del self._held[pool_id]

    def evict_all(self) -> int:
        """Drops all pools and returns the number of their cached pages."""
        count = sum(held.pages.num_cached for held in self._held.values())
        self._held.clear()
        return count


def fits(held: WorkerInfo, info: WorkerInfo) -> bool:
    """Returns whether the content of a page means the same to both workers."""
    return (
        held.pool_layout == info.pool_layout
        and held.identity == info.identity
        and held.weights_version == info.weights_version
        and held.num_pages == info.num_pages
        and (held.window, held.sink_tokens) == (info.window, info.sink_tokens)
    )


def accept(lane: Lane, kept: KeptPages | None, config: CoreConfig) -> list[fx.Effect]:
    """Gives a new lane the pages that its worker has kept. Returns the answer to the worker, and a note."""
    if not config.page_root:
        return [fx.WorkerAccepted(worker=lane.worker, generation=lane.generation)]
    lane.pages.labels.is_on = True
    # The labels were made by this core or by one that it continues, and are not older than the pages: a copy of the
    # journal may be older than the worker's newest plan.
    keeps_pages = kept is not None and kept.page_root == config.page_root and kept.generation < lane.generation
    accepted = fx.WorkerAccepted(
        worker=lane.worker, generation=lane.generation, page_root=config.page_root, keeps_pages=keeps_pages
    )
    if kept is None or not keeps_pages:
        return [accepted]
    labels = kept.labels
    lane.pool.restore(labels.pages.tolist(), labels.hashes, labels.tokens)
    return [accepted, fx.News(message=f"worker {lane.worker} has kept {numbered(lane.pool.num_cached, 'page')}")]
