"""Pages that sequences share. Owns forks and copies on write; hashes, index and eviction are the core's own.

A full page is cached by the hash of all tokens up to its end, until it is evicted. At least one token of a sequence is
computed, in a page that only this sequence holds, so a cached page is never written again. Samples admitted before the
first of them has generated a token fork: they hold all pages of its prompt, the partial one included. A sequence that
writes into a page held by several sequences copies it first.
"""

from scheduler_svc.core.messages.page_hash import HASH_BYTES, hash_pages, prefix_root
from scheduler_svc.simulator.memory.layouts.paged import Paged, Table
from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Sequence


class Shared(Paged):
    """`used` and `reserved` count a page once. `saved` counts it for every further holder."""

    name = "shared"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._root = prefix_root(settings.seed.to_bytes(8, "little"), "")
        self._chains: dict[int, bytes] = {}
        self._tokens: dict[int, bytes] = {}
        self._written = [0] * self._pool.num_pages
        # By request, the sequence that was admitted last without a fork. Later samples may fork from it.
        self._newest: dict[int, int] = {}

    @property
    def cached(self) -> int:
        return self._pool.num_evictable * self._page_size

    def prepare(self, sequence: Sequence) -> None:
        self._chains[sequence.index] = hash_pages(self._root, sequence.tokens, self._page_size)
        self._tokens[sequence.index] = sequence.tokens.astype("<i4", copy=False).tobytes()

    def admit(self, sequence: Sequence, length: int) -> int | None:
        if length == sequence.prompt and self._fork(sequence):
            return length
        first, size = self._first(length), self._page_size
        num_hit, found = self._find(sequence, length)
        hits = found[first:num_hit]
        # Held before the allocation, which could otherwise evict a hit.
        for page in hits:
            self._hold(page)
        start = max(first, num_hit)
        pages = self._pool.allocate(self._num_pages(length) - start)
        if pages is None:
            self._release(hits)
            return None
        for i, page in enumerate(pages, start):
            self._count_new(page, min(size, length - i * size))
            if (i + 1) * size <= length:
                self._pool.cache(page, *self._key(sequence, i))
        self._held[sequence.index] = Table(hits + pages, first, length)
        self._newest[sequence.request] = sequence.index
        return num_hit * size

    def grow(self, sequence: Sequence) -> bool:
        table, size = self._held[sequence.index], self._page_size
        offset = table.length % size
        if offset and self._pool.references(table.pages[-1]) > 1 and not self._copy_last(table, offset):
            return False
        if not super().grow(sequence):
            return False
        self._written[table.pages[-1]] = offset + 1
        if offset + 1 == size:
            self._pool.cache(table.pages[-1], *self._key(sequence, table.length // size - 1))
        return True

    def _copy_last(self, table: Table, written: int) -> bool:
        """Copies the last page, which other sequences hold too. Returns False if the memory is full."""
        taken = self._pool.allocate(1)
        if taken is None:
            return False
        self._count_new(taken[0], written)
        self._release([table.pages.pop()])
        table.pages += taken
        self.moves += 1
        self.moved += written
        return True

    def release(self, sequence: Sequence) -> None:
        self._release(self._held.pop(sequence.index).pages)
        if self._newest.get(sequence.request) == sequence.index:
            del self._newest[sequence.request]

    def _fork(self, sequence: Sequence) -> bool:
        """Shares the pages of a sample that holds exactly the prompt. Returns False if no sample does."""
        other = self._newest.get(sequence.request)
        if other is None or self._held[other].length != sequence.prompt:
            return False
        held = self._held[other]
        for page in held.pages:
            self._hold(page)
        self._held[sequence.index] = Table(held.pages.copy(), held.first, held.length)
        return True

    def _find(self, sequence: Sequence, length: int) -> tuple[int, list[int]]:
        """Returns how many pages from the start need no computation, and the page of each, 0 if it is not cached.

        Pages before a position need no computation if all pages of that position's window are cached.
        """
        found: list[int] = []
        # `start` is where the current run of cached pages begins.
        start = best = 0
        for i in range((length - 1) // self._page_size):
            page = self._pool.find(*self._key(sequence, i))
            found.append(page)
            if not page:
                if self._window is None:
                    break
                start = i + 1
            elif start <= self._first((i + 1) * self._page_size):
                best = i + 1
        return best, found

    def _key(self, sequence: Sequence, index: int) -> tuple[bytes, bytes]:
        """Returns the hash and the tokens of a full page."""
        size = 4 * self._page_size
        chain, tokens = self._chains[sequence.index], self._tokens[sequence.index]
        return chain[index * HASH_BYTES : (index + 1) * HASH_BYTES], tokens[index * size : (index + 1) * size]

    def _count_new(self, page: int, written: int) -> None:
        """Counts a page that the pool allocated."""
        self._written[page] = written
        self.reserved += self._page_size
        self.used += written

    def _hold(self, page: int) -> None:
        """Adds a holder to a page that is cached or held."""
        if self._pool.references(page):
            self.saved += self._page_size
        else:
            self.reserved += self._page_size
            self.used += self._written[page]
        self._pool.share(page)

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            if self._pool.references(page) > 1:
                self.saved -= self._page_size
                continue
            self.reserved -= self._page_size
            self.used -= self._written[page]
        self._pool.release(pages)
