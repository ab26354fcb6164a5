"""The second tier of kept pages: a worker's host memory, as the core sees it.

Owns which host page holds what, and which was used longest ago. Pages come here when a request is preempted, because
moving them twice is cheaper than computing them again (`policy.swapping_pays`); whoever begins alike may load them.
Knows nothing of devices: saves and loads travel in plans, which the worker carries out in order.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPage:
    """`tokens` are the page's, little-endian int32; `suspect` where no finite sample has read all of it."""

    slot: int
    tokens: bytes
    unverified: bool


class HostPool:
    """`num_slots` host pages, numbered from 0."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # Least recently used first.
        self._kept: OrderedDict[bytes, HostPage] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Host pages that hold something."""
        return len(self._kept)

    def find(self, page_hash: bytes, tokens: bytes) -> HostPage | None:
        """The host page with this past and these tokens."""
        found = self._kept.get(page_hash)
        return found if found is not None and found.tokens == tokens else None

    def touch(self, page_hash: bytes) -> None:
        """Notes that it was used."""
        self._kept.move_to_end(page_hash)

    def store(self, page_hash: bytes, tokens: bytes, *, unverified: bool) -> int | None:
        """A slot for the page, another's if none is free; None: it is here already, or there is no host memory."""
        if page_hash in self._kept or not self.num_slots:
            return None
        slot = self._free.pop() if self._free else self._kept.popitem(last=False)[1].slot
        self._kept[page_hash] = HostPage(slot=slot, tokens=tokens, unverified=unverified)
        return slot

    def evict(self, page_hash: bytes) -> None:
        """Its content cannot be trusted, or never arrived."""
        found = self._kept.pop(page_hash, None)
        if found is not None:
            self._free.append(found.slot)

    def is_unverified(self, page_hash: bytes) -> bool:
        """Whether it is here, and may not be finite."""
        found = self._kept.get(page_hash)
        return found is not None and found.unverified

    def evict_all(self) -> int:
        """Empties it; returns how many it held."""
        count = len(self._kept)
        for page_hash in list(self._kept):
            self.evict(page_hash)
        return count

    def audit(self) -> None:
        """Every slot is free or holds one thing."""
        slots = self._free + [page.slot for page in self._kept.values()]
        assert sorted(slots) == list(range(self.num_slots)), "host slots lost or held twice"
