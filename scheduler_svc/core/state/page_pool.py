"""The pages of one lane: reference counts, the free list in eviction order, and the index of pages that are kept.

Owns which pages are free, kept or used, which hash names a page, and which may hold values that are not finite. Page 0
is reserved for padding and never appears. Knows nothing of what stands in a page, of rows or of requests.

    free + kept + used = num_pages - 1

A used page is held by somebody. A free one is held by nobody; it keeps its content, and one that the index names is
kept: a request that begins alike takes it back from the middle of the list, in O(1). What no hash names is handed out
first, then the page that was given up longest ago. A hash covers everything up to its page's end (`page_hash`), and the
tokens are compared all the same.

A page that was handed out is suspect until a finite sample has read all of it: its next owner multiplies its stale
tail by zero, which NaN survives, so a suspect page is zeroed when it is handed out again.
"""

from collections.abc import Iterable, Sequence


class PagePool:
    """`num_pages` pages, page 0 included."""

    __slots__ = (
        "_hashes",
        "_next",
        "_page_of",
        "_previous",
        "_references",
        "_tokens",
        "_unverified",
        "num_evictable",
        "num_pages",
        "num_unused",
    )  # fmt: skip

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 2, page 0 is reserved")
        self.num_pages = num_pages
        self.num_unused = num_pages - 1
        """Free and kept pages: what can be handed out."""
        self.num_evictable = 0
        # A doubly linked ring over page numbers; page 0 is its anchor. Lists, not arrays: single elements are read and
        # written, which numpy does three times slower.
        self._next = [*range(1, num_pages), 0]
        self._previous = [num_pages - 1, *range(num_pages - 1)]
        self._references = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_pages
        self._tokens: list[bytes] = [b""] * num_pages
        # 1 where values may not be finite.
        self._unverified = bytearray(num_pages)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - 1 - self.num_unused

    @property
    def num_cached(self) -> int:
        """Pages that a hash names, held or not."""
        return len(self._page_of)

    def references(self, page: int) -> int:
        """How many hold this page."""
        return self._references[page]

    # Holding -------------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, each with one reference and out of the index; None, and no change, if too few.

        Whoever asks looks at `suspect` first, by `take_unverified`.
        """
        if count > self.num_unused:
            return None
        following, references, hashes = self._next, self._references, self._hashes
        pages: list[int] = []
        page = following[0]
        for _ in range(count):
            pages.append(page)
            references[page] = 1
            if hashes[page] is not None:
                self.num_evictable -= 1
                self._drop_hash(page)
            page = following[page]
        following[0] = page
        self._previous[page] = 0
        self.num_unused -= count
        return pages

    def take_unverified(self, pages: Iterable[int]) -> list[int]:
        """Those of freshly allocated pages that must be zeroed. All of them are suspect from now on."""
        unverified = self._unverified
        found = [page for page in pages if unverified[page]]
        for page in pages:
            unverified[page] = 1
        return found

    def is_unverified(self, page: int) -> bool:
        """Whether the page may hold values that are not finite."""
        return bool(self._unverified[page])

    def mark_verified(self, page: int) -> None:
        """A finite sample has read all values of the page."""
        self._unverified[page] = 0

    def share(self, page: int) -> None:
        """Adds a reference; a page that nobody held leaves the list wherever it stands."""
        assert 0 < page < self.num_pages
        if self._references[page] == 0:
            before, after = self._previous[page], self._next[page]
            self._next[before] = after
            self._previous[after] = before
            self.num_unused -= 1
            self.num_evictable -= self._hashes[page] is not None
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each, last page first; those that nobody holds can be handed out.

        Tails before heads: a sequence's head is what another is likelier to share, so it is evicted later.
        """
        references = self._references
        for page in reversed(pages):
            assert references[page] > 0, f"page {page} is free already"
            references[page] -= 1
            if references[page] == 0:
                self._enlist(page)

    def _enlist(self, page: int) -> None:
        """To the list's end where a hash names it, else to its front."""
        following, previous = self._next, self._previous
        if self._hashes[page] is None:
            before, after = 0, following[0]
        else:
            before, after = previous[0], 0
            self.num_evictable += 1
        following[before] = page
        previous[page] = before
        following[page] = after
        previous[after] = page
        self.num_unused += 1

    # The index -----------------------------------------------------------------------------------------------------

    def find(self, page_hash: bytes, tokens: bytes) -> int:
        """The page with this past and these tokens; 0: none."""
        page = self._page_of.get(page_hash, 0)
        return page if page and self._tokens[page] == tokens else 0

    def cache(self, page: int, page_hash: bytes, tokens: bytes) -> bool:
        """Names a held page, which is never written again; False: another has this name, or it has one."""
        assert self._references[page] > 0, f"page {page} is kept and nobody holds it"
        if page_hash in self._page_of or self._hashes[page] is not None:
            return False
        self._page_of[page_hash] = page
        self._hashes[page] = page_hash
        self._tokens[page] = tokens
        return True

    def hash_of(self, page: int) -> bytes | None:
        """The hash that names the page."""
        return self._hashes[page]

    def tokens(self, page: int) -> bytes:
        """The tokens of a page that a hash names."""
        return self._tokens[page]

    def page_with_hash(self, page_hash: bytes) -> int:
        """The page of this hash, whatever its tokens; 0: none."""
        return self._page_of.get(page_hash, 0)

    def evict(self, page: int) -> None:
        """Takes a page out of the index; whoever holds it goes on."""
        if self._hashes[page] is None:
            return
        self.num_evictable -= self._references[page] == 0
        self._drop_hash(page)

    def evict_all(self) -> int:
        """Empties the index; returns how many pages it named."""
        count = len(self._page_of)
        for page in list(self._page_of.values()):
            self.evict(page)
        return count

    def _drop_hash(self, page: int) -> None:
        page_hash = self._hashes[page]
        assert page_hash is not None
        del self._page_of[page_hash]
        self._hashes[page] = None
        self._tokens[page] = b""

    def free_pages(self) -> list[int]:
        """Pages that nobody holds, in the order in which they are handed out; O(pages), for audits and tests."""
        pages: list[int] = []
        page = self._next[0]
        while page:
            pages.append(page)
            page = self._next[page]
        return pages
