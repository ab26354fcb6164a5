"""The pages of one lane's worker: page pool, host pool, labels, and the pool that the worker may take over.

A plan may let a worker take over the pool of a lost worker (`recovery/held_pools.py`). The lane has that pool's pages
at once; its next plan names the pool. If the worker answers that it could not, all pages are evicted.

**Labels** describe the worker's pages to it, in case this core dies and another one continues. A page is
labelled when a step that attended to all of it gave finite logits: it is then full, verified and confirmed. The label
goes with the next plan. The worker drops it when a later plan gives the page to a row that writes it. When the worker
joins a later core, it reports its labels (`recovery/held_pools.py`).
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from scheduler_svc.core.messages.plan import PageLabels, SentPlan, TakeOver
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.pages.host_pool import HostPool
from scheduler_svc.core.pages.page_index import PageIndex, Place
from scheduler_svc.core.pages.page_pool import PagePool

# A plan has labels of about this size at most; the others follow with the next plans.
_MAX_BYTES = 1 << 20


class LabelQueue:
    """Pages with labels that the worker does not have yet. Their hashes and tokens are read when a plan takes them."""

    __slots__ = ("_forget", "_pages", "_sent", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        """Whether the worker gets labels. It gets none if no later core could use its pages."""
        # A dictionary keeps the order, and each page once.
        self._pages: dict[int, None] = {}
        # Pages with labels in a plan in flight, with the plan's step; also a few of earlier plans.
        self._sent: deque[tuple[int, list[int]]] = deque()
        self._forget = False

    def add(self, page: int) -> None:
        """Queues a page that has become verified."""
        self._pages[page] = None

    def add_cached(self, pool: PagePool) -> None:
        """Queues the verified pages of the index: a worker has taken the pool over and has no label of it."""
        if not self.is_on:
            return
        self._pages.update(dict.fromkeys(page for page in pool.cached_pages() if not pool.is_unverified(page)))

    def take(self, pool: PagePool, in_flight: deque[SentPlan]) -> PageLabels | None:
        """Takes the labels that go with the newest plan in flight, None without any."""
        if not self._pages and not self._forget:
            return None
        forget, self._forget = self._forget, False
        labels: list[tuple[int, bytes, bytes]] = []
        size = 0
        while self._pages and size < _MAX_BYTES:
            page = next(iter(self._pages))
            del self._pages[page]
            page_hash, tokens = pool.hash_of(page), pool.tokens(page)
            # If the page was allocated again, other content will be written to it.
            if page_hash is not None and not pool.is_unverified(page):
                labels.append((page, page_hash, tokens))
                size += len(page_hash) + len(tokens)
        if not labels and not forget:
            return None
        pages = [page for page, _, _ in labels]
        while self._sent and self._sent[0][0] < in_flight[0].step:
            self._sent.popleft()
        self._sent.append((in_flight[-1].step, pages))
        return PageLabels(
            pages=np.array(pages, np.int32),
            hashes=tuple(page_hash for _, page_hash, _ in labels),
            tokens=tuple(tokens for _, _, tokens in labels),
            forget=forget,
        )

    def lane_reset(self, in_flight: deque[SentPlan], *, keep_pages: bool) -> None:
        """These plans are void, so their labels are sent again, if pages stay cached. Otherwise none is left."""
        void = {record.step for record in in_flight}
        again: Iterable[int] = (page for step, pages in self._sent if step in void for page in pages)
        self._pages = {**dict.fromkeys(again), **self._pages} if keep_pages else {}
        self._sent.clear()
        self._forget |= not keep_pages

    def forget(self) -> None:
        """No page is cached any more: the next plan drops all labels."""
        self._pages.clear()
        self._forget = True


class LanePages:
    """The pages of one lane, from its opening to its close."""

    def __init__(self, info: WorkerInfo, index: PageIndex | None = None) -> None:
        """`index` has the cached pages of all lanes; a lane without one has an index of its own."""
        self.own_pool_id = info.pool_id
        """Names the memory of the worker's own pool if it outlives the worker. Empty otherwise."""
        self.pool_id = info.pool_id
        """Names the memory of the pool that the worker uses, as `own_pool_id`; empty if no worker may take it."""
        self.pool = PagePool(info.num_pages)
        self.host = HostPool(info.host_pages)
        self.labels = LabelQueue()
        self.index = PageIndex() if index is None else index
        self.bit = self.index.open()
        """The lane in the index."""
        self.pending: TakeOver | None = None
        """The pool that the worker shall take over, but no plan has named yet."""
        self.num_taken_over = 0
        """Cached pages of the pool that the worker was given last, when it was."""
        self._zero_pages: list[int] = []
        self._enter_index()

    def _enter_index(self) -> None:
        on_device, in_host_memory = self.index.places(self.bit)
        self.pool.move_to(on_device)
        self.host.move_to(in_host_memory)

    def close(self) -> None:
        """Takes the lane out of the index."""
        self.pool.move_to(Place.alone())
        self.host.move_to(Place.alone())
        self.index.close(self.bit)

    def allocate(self, count: int) -> list[int] | None:
        """Allocates pages, or returns None if too few are unused. The next plan zeroes those that need it."""
        pages = self.pool.allocate(count)
        if pages is not None:
            self._zero_pages += self.pool.take_unverified(pages)
        return pages

    def take_zero_pages(self) -> list[int]:
        """Takes the pages that the next plan must zero."""
        pages, self._zero_pages = self._zero_pages, []
        return pages

    def evict_all(self) -> None:
        """Empties the prefix cache, because the content of the pages is unknown."""
        self.pool.evict_all()
        self.host.evict_all()

    # The pool of a lost worker -------------------------------------------------------------------------------------

    def take_over(self, pool: PagePool, take_over: TakeOver) -> None:
        """Replaces the page pool, which no row uses, by that of a lost worker. The next plan names it to the worker."""
        assert not self.pool.num_used and not self._zero_pages, "pages of the pool that is replaced are in use"
        self.pool.move_to(Place.alone())
        self.pool, self.pool_id, self.pending = pool, take_over.pool_id, take_over
        self.num_taken_over = pool.num_cached
        self._enter_index()

    def take_order(self) -> TakeOver | None:
        """Takes the pool that the plan being made names to the worker, None without one."""
        take_over, self.pending = self.pending, None
        return take_over

    def drop_take_over(self) -> None:
        """Leaves the worker its own pool, because no plan named another; no page of it is cached."""
        self.pending = None
        self.pool_id = self.own_pool_id
        self.pool.evict_all()

    def answered(self, wanted: bytes, used: bytes) -> None:
        """Records the result of a plan that named pool `wanted` to take over; the worker uses pool `used` now.

        If these differ, no page has the content that its hash says, so all pages are evicted.
        """
        if used != wanted:
            self.pool.evict_all()
            self.pool_id = self.own_pool_id if used == self.own_pool_id else b""
        self.labels.add_cached(self.pool)


def audit_lane_pages(lanes: Sequence[LanePages]) -> None:
    """Checks the index of all lanes, and that no lane is to take over a pool with which another worker has joined."""
    if lanes:
        cached = {lane.bit: (lane.pool.cached_hashes(), lane.host.hashes()) for lane in lanes}
        assert len(cached) == len(lanes), "two lanes have one bit in the index of cached pages"
        lanes[0].index.audit(cached)
    for lane in lanes:
        others = [other.own_pool_id for other in lanes if other is not lane]
        assert lane.pending is None or lane.pending.pool_id not in others, "a pool in use is to be taken over"
