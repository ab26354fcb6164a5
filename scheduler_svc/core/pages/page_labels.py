"""The labels of a lane's pages: what the worker is told of them, in case this core dies and another one continues.

A page is labelled when a step that attended to all of it gave finite logits: it is then full, verified and confirmed.
The label goes with the next plan. The worker drops it when a later plan gives the page to a row that writes it. When
the worker joins a later core, it reports its labels (`workers/held_pools.py`).
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.messages.plan import PageLabels, SentPlan
from scheduler_svc.core.pages.page_pool import PagePool

# A plan has labels of about this size at most; the others follow with the next plans.
_MAX_BYTES = 1 << 20


class LabelQueue:
    """Pages whose labels the worker does not have yet. Their hashes and tokens are read when a plan takes them."""

    __slots__ = ("_forget", "_pages", "_sent", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        """Whether the worker gets labels. It gets none if no later core could use its pages."""
        # A dictionary keeps the order, and each page once.
        self._pages: dict[int, None] = {}
        # Pages whose labels are in a plan in flight, with the plan's step; also a few of earlier plans.
        self._sent: deque[tuple[int, list[int]]] = deque()
        self._forget = False

    def turn_on(self) -> None:
        """The worker gets labels from now on."""
        self.is_on = True

    def add(self, page: int) -> None:
        """Queues a page that has become verified."""
        self._pages[page] = None

    def add_cached(self, pool: PagePool) -> None:
        """Queues the verified pages of the index: a worker has taken the pool over and has no label of it."""
        if not self.is_on:
            return
        self._pages.update(dict.fromkeys(page for page in pool.cached_pages() if not pool.is_unverified(page)))

    def take(self, pool: PagePool, in_flight: deque[SentPlan]) -> PageLabels | None:
        """Returns the labels that go with the newest plan in flight, None without any."""
        if not self._pages and not self._forget:
            return None
        forget, self._forget = self._forget, False
        found: list[tuple[int, bytes, bytes]] = []
        size = 0
        while self._pages and size < _MAX_BYTES:
            page = next(iter(self._pages))
            del self._pages[page]
            page_hash, tokens = pool.hash_of(page), pool.tokens(page)
            # If the page was allocated again, other content will be written to it.
            if page_hash is not None and not pool.is_unverified(page):
                found.append((page, page_hash, tokens))
                size += len(page_hash) + len(tokens)
        if not found and not forget:
            return None
        pages = [page for page, _, _ in found]
        while self._sent and self._sent[0][0] < in_flight[0].step:
            self._sent.popleft()
        self._sent.append((in_flight[-1].step, pages))
        return PageLabels(
            pages=np.array(pages, np.int32),
            hashes=tuple(page_hash for _, page_hash, _ in found),
            tokens=tuple(tokens for _, _, tokens in found),
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
