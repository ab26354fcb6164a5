"""Which of its own sequence's pages a query sees, by visibility: spans for decode rows, lists for prefill tiles.

Owns the arithmetic between positions, windows and pages, and with it how long page lists get. Pages here are logical
(0 holds positions 0 to page_size - 1); numpy only. Knows nothing of rows, page tables or tensors.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.attention.layers import Visibility
from gpu_worker.geometry import Geometry

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpans:
    """Of each query: the first position it sees, that position's page, and the number of pages from it to its own."""

    first_position: Int64Array
    first_page: Int64Array
    num_pages: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSpans:
    """Of each tile: the pages that all its queries see whole, and the others that some of them see."""

    # Pages first_full to first_full + num_full - 1.
    first_full: Int64Array
    num_full: Int64Array
    # int64 [n, max_partial], of which the first num_partial count.
    partial: Int64Array
    num_partial: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One visibility over the pool of one geometry; its lists have static widths."""

    visibility: Visibility
    page_size: int
    # Query positions of a prefill tile.
    q_block: int
    pages_per_row: int
    # Pages that plans may name, page 0 included.
    num_pages: int

    @classmethod
    def of(cls, visibility: Visibility, geometry: Geometry) -> "View":
        """The view of layers with this visibility."""
        return cls(
            visibility=visibility,
            page_size=geometry.page_size,
            q_block=geometry.chunk_align,
            pages_per_row=geometry.pages_per_row,
            num_pages=geometry.num_pages,
        )

    @property
    def num_sink_pages(self) -> int:
        """1 where the pool has a page more, whose first slot stands for the sinks. No plan can name it, so that it
        stays zero: padding, which writes to page 0, may be NaN, and a masked NaN would still reach every row."""
        return int(self.visibility.has_sinks)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool."""
        return self.num_pages + self.num_sink_pages

    @property
    def sink_slot(self) -> int | None:
        """Token slot that stands for the sinks."""
        return self.num_pages * self.page_size if self.visibility.has_sinks else None

    @property
    def is_plain(self) -> bool:
        """Whether a row lists just its pages from the first on, as the page table has them."""
        return self.visibility == Visibility()

    @property
    def max_decode(self) -> int:
        """Pages of its own that a decode row lists, at most."""
        window = self.visibility.window
        # A window begins at any place of its first page.
        return (
            self.pages_per_row
            if window is None
            else min((window + self.page_size - 2) // self.page_size + 1, self.pages_per_row)
        )

    @property
    def max_full(self) -> int:
        """Pages that a tile lists as seen whole, at most."""
        window = self.visibility.window
        return self.pages_per_row if window is None else min(window // self.page_size, self.pages_per_row)

    @property
    def max_partial(self) -> int:
        """Pages of its own that a tile lists as seen in part, at most: where its last positions lie, and with a window
        as many where its queries' windows begin."""
        per_edge = (self.page_size + self.q_block - 3) // self.page_size + 1
        return min(per_edge if self.visibility.window is None else 2 * per_edge, self.pages_per_row)

    def _first_seen(self, positions: Int64Array) -> Int64Array:
        if self.visibility.window is None:
            return np.zeros_like(positions)
        return np.maximum(positions - self.visibility.window + 1, 0)

    def decode_spans(self, positions: Int64Array) -> DecodeSpans:
        """What queries at `positions` [n] see."""
        first_position = self._first_seen(positions)
        first_page = first_position // self.page_size
        num_pages = positions // self.page_size - first_page + 1
        return DecodeSpans(first_position=first_position, first_page=first_page, num_pages=num_pages)

    def tile_spans(self, first: Int64Array, last: Int64Array) -> TileSpans:
        """What tiles of queries at positions `first` to `last`, each [n], see."""
        first_page, last_page = self._first_seen(first) // self.page_size, last // self.page_size
        # Every query sees a page that begins where the last one's window does or later, and ends at the first one.
        first_full = -(-self._first_seen(last) // self.page_size)
        end_full = (first + 1) // self.page_size
        has_full = first_full < end_full
        num_full = np.where(has_full, end_full - first_full, 0)
        num_left = np.where(has_full, first_full - first_page, 0)
        right = np.where(has_full, end_full, first_page)
        num_partial = num_left + last_page - right + 1
        nth = np.arange(self.max_partial)
        left_part = first_page[:, None] + nth
        partial = np.where(nth < num_left[:, None], left_part, left_part - (first_page + num_left - right)[:, None])
        return TileSpans(
            first_full=first_full,
            num_full=num_full,
            # What does not count stays a page that a row can have.
            partial=np.minimum(partial, self.pages_per_row - 1),
            num_partial=num_partial,
        )
