"""Which lanes have a page cached, for all lanes at once, so that a request is looked up in one walk along its pages.

The index has one entry for each cached page hash: the lanes as bits of an integer. A lane has two bits, one for its
pages on the device and one for its host pages. Hashes alone are compared, not tokens: the index says where a request
would probably start sooner, and the lane that starts it compares the tokens.
"""

from collections.abc import Collection, Iterable, Mapping


class Place:
    """The pages of one lane that are on the device, or those in host memory, as a part of the index."""

    __slots__ = ("_bit", "_masks")

    def __init__(self, masks: dict[bytes, int], bit: int) -> None:
        self._masks, self._bit = masks, bit

    @staticmethod
    def alone() -> "Place":
        """Returns a place in no index: that of a pool without a lane."""
        return Place({}, 1)

    def add(self, page_hash: bytes) -> None:
        """Records that the page is cached here."""
        self._masks[page_hash] = self._masks.get(page_hash, 0) | self._bit

    def remove(self, page_hash: bytes) -> None:
        """Records that the page, which was added, is not cached here any more."""
        left = self._masks[page_hash] & ~self._bit
        if left:
            self._masks[page_hash] = left
        else:
            del self._masks[page_hash]


class PageIndex:
    """The cached pages of all lanes. A lane's bit is 1 << 2n for its slot n, the lowest free one when it opened."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._used_slots = 0

    def open(self) -> int:
        """Opens a lane, and returns its bit."""
        bit = 1
        while self._used_slots & bit:
            bit <<= 2
        self._used_slots |= bit
        return bit

    def close(self, bit: int) -> None:
        """Frees the bit of a lane that has only empty places."""
        self._used_slots &= ~bit

    def places(self, bit: int) -> tuple[Place, Place]:
        """Returns the places of a lane's pages on the device and in host memory."""
        return Place(self._masks, bit), Place(self._masks, bit << 1)

    def depths(self, page_hashes: Iterable[bytes]) -> list[tuple[int, int]]:
        """Returns how many of the first pages each lane has: (lanes, number of pages), most pages first.

        Lanes are bits; those without the first page are missing.
        """
        depths: list[tuple[int, int]] = []
        alive, depth, get = self._used_slots, 0, self._masks.get
        for page_hash in page_hashes:
            mask = get(page_hash, 0)
            here = alive & (mask | mask >> 1)
            if here != alive:
                if depth:
                    depths.append((alive & ~here, depth))
                alive = here
                if not alive:
                    break
            depth += 1
        if alive and depth:
            depths.append((alive, depth))
        depths.reverse()
        return depths

    def any_of(self, page_hashes: Iterable[bytes]) -> int:
        """Returns the lanes, as bits, that have at least one of the pages."""
        mask, get = 0, self._masks.get
        for page_hash in page_hashes:
            mask |= get(page_hash, 0)
        return (mask | mask >> 1) & self._used_slots

    def audit(self, cached: Mapping[int, tuple[Collection[bytes], Collection[bytes]]]) -> None:
        """Raises AssertionError unless these are the pages: of each lane's bit, on the device and in host memory."""
        expected = dict[bytes, int]()
        for bit, places in cached.items():
            for place, page_hashes in enumerate(places):
                for page_hash in page_hashes:
                    expected[page_hash] = expected.get(page_hash, 0) | bit << place
        assert self._masks == expected, "the index of cached pages differs from the pools"
        assert self._used_slots == sum(cached), "a lane has no bit, or two have the same"
