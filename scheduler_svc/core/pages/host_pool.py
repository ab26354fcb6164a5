"""The host pages of one lane: a part of the prefix cache in the worker's host memory.

A preempted request's pages are swapped out to host pages if copying them twice takes less time than computing them
again (`policy.swapping_pays`). Any request with the same prefix may swap them in. If no host page is free, the least
recently used one is evicted.

A page counts as stored as soon as the plan that swaps it out is being made. The worker copies it later. This is safe
because the worker applies plans in order.
"""

from collections import OrderedDict
from dataclasses import dataclass

from scheduler_svc.core.pages.page_index import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPage:
    """A cached page in host memory."""

    slot: int
    """Number of the host page."""
    tokens: bytes
    """The tokens of the page, little-endian int32."""
    unverified: bool
    """Whether the page may hold values that are not finite (`page_pool`)."""


class HostPool:
    """`num_slots` host pages, numbered from 0, and the index from page hash to host page."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # In eviction order: the least recently used page is the first.
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
        self._place = Place.alone()

    @property
    def num_used(self) -> int:
        """Host pages that hold a cached page."""
        return len(self._pages)

    def find(self, page_hash: bytes, tokens: bytes) -> HostPage | None:
        """Returns the host page with this hash and these tokens, or None."""
        page = self._pages.get(page_hash)
        return page if page is not None and page.tokens == tokens else None

    def touch(self, page_hash: bytes) -> None:
        """Marks the page with this hash as the most recently used one."""
        self._pages.move_to_end(page_hash)

    def store(self, page_hash: bytes, tokens: bytes, *, unverified: bool) -> int | None:
        """Stores a page, and returns the slot to swap it out to. Evicts the least recently used page if none is free.

        Returns None if the page is in host memory already, or if the worker has no host pages.
        """
        if page_hash in self._pages or not self.num_slots:
            return None
        if not self._free:
            self.evict(next(iter(self._pages)))
        slot = self._free.pop()
        self._place.add(page_hash)
        self._pages[page_hash] = HostPage(slot=slot, tokens=tokens, unverified=unverified)
        return slot

    def evict(self, page_hash: bytes) -> None:
        """Removes the page with this hash, if it is stored."""
        page = self._pages.pop(page_hash, None)
        if page is not None:
            self._place.remove(page_hash)
            self._free.append(page.slot)

    def is_unverified(self, page_hash: bytes) -> bool:
        """Returns whether the page with this hash is in host memory and may hold values that are not finite."""
        page = self._pages.get(page_hash)
        return page is not None and page.unverified

    def evict_all(self) -> int:
        """Removes all pages and returns their number."""
        count = len(self._pages)
        for page_hash in list(self._pages):
            self.evict(page_hash)
        return count

    def move_to(self, place: Place) -> None:
        """Moves the entries of all pages to another place of the index of all lanes."""
        for page_hash in self._pages:
            self._place.remove(page_hash)
            place.add(page_hash)
        self._place = place

    def hashes(self) -> list[bytes]:
        return list(self._pages)

    def audit(self) -> None:
        """Raises AssertionError unless every slot is either free or holds exactly one page."""
        slots = self._free + [page.slot for page in self._pages.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a host slot is missing or used twice"
