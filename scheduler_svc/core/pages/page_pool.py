"""The pages of one lane's KV cache: reference counts, the free list, the prefix cache index, and unverified pages.

**Reference counts.** A page is used while at least one row holds a reference to it, and unused otherwise. Page 0 is
reserved for the positions that pad a step, and is neither.

    num_used + num_unused = num_pages - 1

**Prefix cache.** The index maps the hash of a full page (`page_hash`) to the page that holds its keys and values. A
page in the index is cached. After the plan that fills it, it is never written again, so any number of rows may share
it. It stays cached until it is evicted, also when its last reference is released. `find` also compares the tokens, so a
hash collision is harmless.

**Free list.** The unused pages form a doubly linked list in eviction order. `allocate` takes pages from its front and
evicts those that are cached. A released page goes to the front if it is not cached and to the end if it is, so pages
without cached content are allocated first, then the cached page that was released longest ago. `share` takes a page out
of the middle of the list in O(1).

**Unverified pages.** An allocated page is unverified until a row that attended to all of its values got finite logits.
A request with NaN in its keys or values may leave NaN in the page. The next owner's attention masks these values, but
it multiplies them by zero, and 0 * NaN is NaN. An unverified page must therefore be zeroed when it is allocated again.
"""

from collections.abc import Iterable, Mapping, Sequence

from scheduler_svc.core.pages.page_index import Place


class PagePool:
    """`num_pages` pages, page 0 included. At the start all but page 0 are unused, and none is cached."""

    __slots__ = ("_hashes", "_next", "_page_by_hash", "_place", "_previous", "_references", "_tokens", "_unverified",
                 "num_evictable", "num_pages", "num_releases", "num_unused")  # fmt: skip

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 2, page 0 is reserved")
        self.num_pages = num_pages
        self.num_unused = num_pages - 1
        """Pages in the free list, cached or not."""
        self.num_releases = 0
        """Calls of `release` so far."""
        self.num_evictable = 0
        """Cached pages in the free list."""
        # The free list is a ring with page 0 as its anchor. These are lists, because numpy takes three times as long to
        # read and write single elements.
        self._next = [*range(1, num_pages), 0]
        self._previous = [num_pages - 1, *range(num_pages - 1)]
        self._references = [0] * num_pages
        self._page_by_hash: dict[bytes, int] = {}
        self._place = Place.alone()
        self._hashes: list[bytes | None] = [None] * num_pages
        self._tokens: list[bytes] = [b""] * num_pages
        # 1 if the page is unverified.
        self._unverified = bytearray(num_pages)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - 1 - self.num_unused

    @property
    def num_cached(self) -> int:
        """Pages in the prefix cache index, used or not."""
        return len(self._page_by_hash)

    def references(self, page: int) -> int:
        """Returns the page's reference count."""
        return self._references[page]

    # References ----------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages from the free list, evicts the cached ones, and gives each page one reference.

        Returns None and changes nothing if the list is too short. The caller passes the pages to `take_unverified` and
        zeroes those that it returns.
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
        """Marks newly allocated `pages` as unverified, and returns those of them that must be zeroed."""
        unverified = self._unverified
        to_zero = [page for page in pages if unverified[page]]
        for page in pages:
            unverified[page] = 1
        return to_zero

    def is_unverified(self, page: int) -> bool:
        """Returns whether the page may hold values that are not finite."""
        return bool(self._unverified[page])

    def mark_verified(self, page: int) -> None:
        """Records that all values of the page are finite."""
        self._unverified[page] = 0

    def share(self, page: int) -> None:
        """Adds a reference. An unused page leaves the free list."""
        assert 0 < page < self.num_pages
        if self._references[page] == 0:
            before, after = self._previous[page], self._next[page]
            self._next[before] = after
            self._previous[after] = before
            self.num_unused -= 1
            self.num_evictable -= self._hashes[page] is not None
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page. Pages without a reference join the free list.

        `pages` are in the order of the sequence. They join the free list in reverse order, so that the end of the
        sequence is evicted before its start, which other requests are more likely to share.
        """
        self.num_releases += 1
        references = self._references
        for page in reversed(pages):
            assert references[page] > 0, f"page {page} has no reference"
            references[page] -= 1
            if references[page] == 0:
                self._insert(page)

    def _insert(self, page: int) -> None:
        """Inserts the page at the end of the free list if it is cached, otherwise at the front."""
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

    # The prefix cache index ----------------------------------------------------------------------------------------

    def find(self, page_hash: bytes, tokens: bytes) -> int:
        """Returns the cached page with this hash and these tokens, or 0."""
        page = self._page_by_hash.get(page_hash, 0)
        return page if page and self._tokens[page] == tokens else 0

    def cache(self, page: int, page_hash: bytes, tokens: bytes) -> bool:
        """Adds a used page to the index. After the plan being made, nothing may be written to the page.

        Returns False and changes nothing if the page is cached already, or another page with this hash is.
        """
        assert self._references[page] > 0, f"page {page} cannot be cached: it has no reference"
        if page_hash in self._page_by_hash or self._hashes[page] is not None:
            return False
        self._page_by_hash[page_hash] = page
        self._place.add(page_hash)
        self._hashes[page] = page_hash
        self._tokens[page] = tokens
        return True

    def hash_of(self, page: int) -> bytes | None:
        """Returns the hash of a cached page, or None if the page is not cached."""
        return self._hashes[page]

    def tokens(self, page: int) -> bytes:
        """Returns the tokens of a cached page, little-endian int32."""
        return self._tokens[page]

    def page_with_hash(self, page_hash: bytes) -> int:
        """Returns the cached page with this hash, or 0. The tokens are not compared."""
        return self._page_by_hash.get(page_hash, 0)

    def cached_pages(self) -> list[int]:
        """Returns the pages of the index, in the order in which they were cached."""
        return list(self._page_by_hash.values())

    def cached_hashes(self) -> list[bytes]:
        return list(self._page_by_hash)

    def restore(self, pages: Sequence[int], hashes: Sequence[bytes], tokens: Sequence[bytes]) -> None:
        """Caches pages of a new pool; their values are finite. All others are unverified from now on.

        The pages are evicted in the order from the last one to the first one, after those that are not cached.
        """
        self._unverified[:] = b"\1" * self.num_pages
        for page, page_hash, content in zip(reversed(pages), reversed(hashes), reversed(tokens), strict=True):
            self.share(page)
            if self.cache(page, page_hash, content):
                self.mark_verified(page)
            self.release([page])

    def evict(self, page: int) -> None:
        """Removes a page from the index if it is cached. Rows that hold the page keep it."""
        if self._hashes[page] is None:
            return
        self.num_evictable -= self._references[page] == 0
        self._drop_hash(page)

    def evict_all(self) -> int:
        """Empties the index and returns the number of pages that were in it."""
        count = len(self._page_by_hash)
        for page in list(self._page_by_hash.values()):
            self.evict(page)
        return count

    def move_to(self, place: Place) -> None:
        """Moves the entries of all cached pages to another place of the index of all lanes."""
        for page_hash in self._page_by_hash:
            self._place.remove(page_hash)
            place.add(page_hash)
        self._place = place

    def _drop_hash(self, page: int) -> None:
        page_hash = self._hashes[page]
        assert page_hash is not None
        del self._page_by_hash[page_hash]
        self._place.remove(page_hash)
        self._hashes[page] = None
        self._tokens[page] = b""

    def free_pages(self) -> list[int]:
        """Returns the free list in eviction order. It takes O(pages), so only audits and tests call it."""
        pages: list[int] = []
        page = self._next[0]
        while page:
            pages.append(page)
            page = self._next[page]
        return pages

    def audit(self, held: Mapping[int, int]) -> None:
        """Raises AssertionError unless `held` are the references of all used pages, free list and index being right."""
        unused, references = self.free_pages(), [0] * self.num_pages
        assert len(unused) == len(set(unused)) == self.num_unused, "the list of unused pages and its count differ"
        assert 0 not in held and 0 not in unused, "page 0 is in use"
        assert held.keys().isdisjoint(unused), "an unused page is held"
        for page, count in held.items():
            references[page] = count
        for page in range(self.num_pages if self._references != references else 0):
            assert self._references[page] == references[page], (
                f"page {page}: {self._references[page]} references, {references[page]} holders"
            )
        cached = {page_hash: page for page, page_hash in enumerate(self._hashes) if page_hash is not None}
        assert cached == self._page_by_hash, "the prefix cache lost a page, or a hash has another page"
        num_hashes = self.num_pages - self._hashes.count(None)
        assert num_hashes == len(cached), "two pages have one hash"
        num_evictable = sum(self._hashes[page] is not None for page in unused)
        assert num_evictable == self.num_evictable, "evictable pages are miscounted"
