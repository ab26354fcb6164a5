"""The pretend KV memory: per slot a token, its position and the hash of the history up to it.

Owns the slots' content, which outlives rows and generations as a real pool's does. Knows nothing of who may
use a page; it only notices that what is read back is not what was written.
"""

import numpy as np

from tests.rigs.hashing import ROOT, extend, extend_array
from tests.rigs.plan_arrays import PlanError


class PagePool:
    """num_pages × page_size slots. Positions are stored plus one: a zeroed slot is one never written."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._tokens = np.zeros(num_pages * page_size, dtype=np.int32)
        self._marks = np.zeros(num_pages * page_size, dtype=np.int32)
        self._hashes = np.zeros(num_pages * page_size, dtype=np.uint64)
        # Pages that hold values that are not finite; only zeroing helps.
        self._tainted: set[int] = set()
        self._within = np.arange(page_size, dtype=np.int64)
        self._marks_wanted = np.arange(1, num_pages * page_size + 1, dtype=np.int32)

    def read_history(self, row: int, pages: np.ndarray, known: np.ndarray) -> int:
        """The hash of positions 0 … len(known) - 1, read through the page list.

        pages: int64, the row's page list. known: int32, the tokens that ought to stand there. Every slot is
        compared with its position, its token and its predecessor's hash; PlanError says where the first
        difference is.
        """
        length = len(known)
        if length == 0:
            return ROOT
        needed = -(-length // self.page_size)
        slots = (pages[:needed, None] * self.page_size + self._within).ravel()[:length]
        hashes = self._hashes[slots]
        before = np.empty_like(hashes)
        before[0] = ROOT
        before[1:] = hashes[:-1]
        good = self._marks[slots] == self._marks_wanted[:length]
        good &= self._tokens[slots] == known
        good &= extend_array(before, known) == hashes
        if not good.all():
            position = int(np.argmin(good))
            slot = int(slots[position])
            raise PlanError(
                f"row {row}: position {position} on page {slot // self.page_size} reads back token"
                f" {int(self._tokens[slot])} of position {int(self._marks[slot]) - 1}, expected token"
                f" {int(known[position])}: the page was overwritten, never written, or is not the row's"
            )
        return int(hashes[-1])

    def zero(self, pages: list[int]) -> None:
        """Forgets what the pages held, as after the start."""
        for page in pages:
            if not 0 < page < self.num_pages:
                raise PlanError(f"page {page} is to be zeroed, outside 1 … {self.num_pages - 1}")
            span = slice(page * self.page_size, (page + 1) * self.page_size)
            self._tokens[span] = 0
            self._marks[span] = 0
            self._hashes[span] = 0
            self._tainted.discard(page)

    def taint(self, pages: list[int]) -> None:
        """Values that are not finite were written to these pages."""
        self._tainted.update(pages)

    def check_finite(self, row: int, pages: list[int]) -> None:
        """A masked position still multiplies, so nobody may be given a tainted page."""
        for page in pages:
            if page in self._tainted:
                raise PlanError(f"row {row} was given page {page}, which holds values that are not finite")

    def write(self, pages: np.ndarray, start: int, tokens: list[int], history: int) -> int:
        """Writes positions start … and returns the hash of the longer history."""
        for offset, token in enumerate(tokens):
            position = start + offset
            slot = int(pages[position // self.page_size]) * self.page_size + position % self.page_size
            history = extend(history, token)
            self._tokens[slot] = token
            self._marks[slot] = position + 1
            self._hashes[slot] = history
        return history
