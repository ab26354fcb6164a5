"""Which of its own sequence's pages a query sees, by visibility: spans for decode rows, lists for prefill tiles.

Owns the arithmetic between positions, windows and pages, and with it how long page lists get. Pages here are logical
(0 holds positions 0 to page_size - 1); numpy only. Knows nothing of rows, page tables or tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.attention.layers import Visibility
from gpu_worker.geometry import Geometry

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpans:
    """Of each query: the pages that it lists, and the positions in them that it does not see.

    Hidden are the positions from the leading ones' end to where the window begins. Each array is [n].
    """

    # Listed are num_pages pages: the leading ones, then, `skipped` pages later, the window's up to the query's own.
    num_pages: Int64Array
    skipped: Int64Array
    # Hidden positions in the page where the window begins: gap_start to gap_end - 1.
    gap_start: Int64Array
    gap_end: Int64Array
    # Whether the last leading page is another one and hidden after its leading positions.
    cuts_leading: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSpans:
    """Of each tile: the pages that all its queries see whole, and the others that some of them see."""

    # The first num_full of: leading pages that are seen whole, then, `skipped` pages later, those of the window.
    num_full: Int64Array
    skipped: Int64Array
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
    def leading_pages(self) -> int:
        """Pages that hold leading positions."""
        return -(-self.visibility.leading // self.page_size)

    @property
    def whole_leading_pages(self) -> int:
        """Pages that hold leading positions alone."""
        return self.visibility.leading // self.page_size

    @property
    def cuts_leading(self) -> bool:
        """Whether leading positions end inside a page."""
        return self.whole_leading_pages < self.leading_pages

    @property
    def max_decode(self) -> int:
        """Pages of its own that a decode row lists, at most."""
        window = self.visibility.window
        if window is None:
            return self.pages_per_row
        return min(self.leading_pages + self._spanned(window), self.pages_per_row)

    @property
    def max_full(self) -> int:
        """Pages that a tile lists as seen whole, at most."""
        window = self.visibility.window
        if window is None:
            return self.pages_per_row
        return min((window + self.visibility.leading) // self.page_size, self.pages_per_row)

    @property
    def max_partial(self) -> int:
        """Pages of its own that a tile lists as seen in part, at most: where its last positions lie, and with a window
        as many where its queries' windows begin, and the last leading page."""
        window, per_edge = self.visibility.window, self._spanned(self.q_block - 1)
        if window is None:
            return min(per_edge, self.pages_per_row)
        near = min(2 * per_edge, self._spanned(window + self.q_block - 1))
        return min(near + self.cuts_leading, self.pages_per_row)

    def _spanned(self, num_positions: int) -> int:
        """Pages that so many positions touch, at most."""
        return (num_positions + self.page_size - 2) // self.page_size + 1

    def _hidden_end(self, positions: Int64Array) -> Int64Array:
        """Where what queries do not see ends, which begins after the leading positions; 0 where they see everything."""
        if self.visibility.window is None:
            return np.zeros_like(positions)
        window_start = positions - self.visibility.window + 1
        return np.where(window_start > self.visibility.leading, window_start, 0)

    def decode_spans(self, positions: Int64Array) -> DecodeSpans:
        """What queries at `positions` [n] see."""
        hidden_end = self._hidden_end(positions)
        first_page = hidden_end // self.page_size
        skipped = np.maximum(first_page - self.leading_pages, 0)
        return DecodeSpans(
            num_pages=positions // self.page_size - skipped + 1,
            skipped=skipped,
            gap_start=np.minimum(np.maximum(self.visibility.leading, first_page * self.page_size), hidden_end),
            gap_end=hidden_end,
            cuts_leading=(hidden_end > 0) & (first_page >= self.leading_pages),
        )

    def tile_spans(self, first: Int64Array, last: Int64Array) -> TileSpans:
        """What tiles of queries at positions `first` to `last`, each [n], see."""
        page_size, num_leading, num_whole = self.page_size, self.leading_pages, self.whole_leading_pages
        last_page = last // page_size
        # The window's pages, of which the first query sees most.
        first_page = np.maximum(self._hidden_end(first) // page_size, num_leading)
        # Every query sees a page whole that ends at the first one, and begins where the last one's window does.
        first_full = np.maximum(-(-self._hidden_end(last) // page_size), num_whole)
        end_full = (first + 1) // page_size
        has_full = first_full < end_full
        num_leading_full = np.minimum(num_whole, end_full)
        # Runs of pages seen in part: of the leading ones, before the full pages, and after them.
        sees_leading = has_full & (first_full <= num_whole) & self.cuts_leading
        leading_start = np.where(sees_leading, num_leading, num_leading_full)
        right_start = np.where(has_full, np.maximum(end_full, first_page), first_page)
        runs = (
            (leading_start, np.minimum(num_leading, last_page + 1)),
            (first_page, np.where(has_full, first_full, first_page)),
            (right_start, last_page + 1),
        )
        partial, num_partial = self._listed(runs)
        return TileSpans(
            num_full=num_leading_full + np.where(has_full, end_full - first_full, 0),
            skipped=first_full - num_whole,
            partial=partial,
            num_partial=num_partial,
        )

    def _listed(self, runs: Sequence[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
        """The pages of runs, each [start, end) by [n], one after another in [n, max_partial], and their number [n]."""
        nth = np.arange(self.max_partial)
        pages, num_listed = np.zeros((runs[0][0].size, nth.size), np.int64), np.zeros_like(runs[0][0])
        for start, end in runs:
            pages = np.where(nth >= num_listed[:, None], nth + (start - num_listed)[:, None], pages)
            num_listed = num_listed + np.maximum(end - start, 0)
        # What does not count stays a page that a row can have.
        return np.clip(pages, 0, self.pages_per_row - 1), num_listed
