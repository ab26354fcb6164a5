"""Page metadata of one worker: who holds which page, and in which order free pages are handed out.

Owns reference counts and the free list. Knows nothing of requests, rows or tokens. Page 0 is reserved for padding and
is never handed out. Pages keep their content while they are free, so the free list is in eviction order (oldest
freed first) and a page in its middle can be taken back in O(1): what prefix sharing needs.
"""

from collections.abc import Sequence


class PagePool:
    """`num_pages` pages, page 0 included. `free + used = num_pages - 1` after every call."""

    __slots__ = ("_next", "_previous", "_references", "num_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 2, page 0 is reserved")
        self.num_pages = num_pages
        self.num_free = num_pages - 1
        # A doubly linked ring over page numbers; page 0 is its anchor. Lists, not arrays: single elements are read and
        # written, which numpy does three times slower.
        self._next = [*range(1, num_pages), 0]
        self._previous = [num_pages - 1, *range(num_pages - 1)]
        self._references = [0] * num_pages

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - 1 - self.num_free

    def references(self, page: int) -> int:
        """How many hold this page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, least recently freed first, each with one reference; None, and no change, if too few."""
        if count > self.num_free:
            return None
        following, references = self._next, self._references
        pages: list[int] = []
        page = following[0]
        for _ in range(count):
            pages.append(page)
            references[page] = 1
            page = following[page]
        following[0] = page
        self._previous[page] = 0
        self.num_free -= count
        return pages

    def share(self, page: int) -> None:
        """Adds a reference; a free page leaves the free list wherever it stands."""
        assert 0 < page < self.num_pages
        if self._references[page] == 0:
            before, after = self._previous[page], self._next[page]
            self._next[before] = after
            self._previous[after] = before
            self.num_free -= 1
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each; those that nobody holds join the free list, last page first.

        Tails before heads: a sequence's head is what another is likelier to share, so it is evicted later.
        """
        references, following, previous = self._references, self._next, self._previous
        for page in reversed(pages):
            assert references[page] > 0, f"page {page} is free already"
            references[page] -= 1
            if references[page] == 0:
                last = previous[0]
                following[last] = page
                previous[page] = last
                following[page] = 0
                previous[0] = page
                self.num_free += 1

    def free_pages(self) -> list[int]:
        """Free pages in eviction order; O(free), for audits and tests."""
        pages: list[int] = []
        page = self._next[0]
        while page:
            pages.append(page)
            page = self._next[page]
        return pages
