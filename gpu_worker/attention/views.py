"""Which parts of its sequence a query sees, by attention pattern: spans for decode rows, lists for prefill tiles.

Owns the arithmetic between positions, windows, pages and blocks, the widths of lists, and the types of a step's lists,
which are numpy arrays on the host and tensors on the device. Prefill tiles list whole pages. Decode rows list blocks,
equal parts of a page, so that the kernel does not read the rest of a row's last page. Pages and blocks are logical here
(page 0 holds positions 0 to page_size - 1). Imports no torch. Knows nothing of rows, page tables or tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import Array, Int64Array
from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks(Generic[Array]):
    """The blocks of each decode slot; all int64 [slots]."""

    # Listed blocks, that of learned sinks included; 0 for an idle slot.
    num_blocks: Array
    # None without a window. The blocks left out between those of the sink tokens and those of the window.
    skipped: Array | None = None
    # Token slots gap_start to gap_end - 1 of the window's first block are hidden.
    gap_start: Array | None = None
    gap_end: Array | None = None
    # None unless sink tokens end inside a block. Token slots of that block that are hidden.
    sink_gap_start: Array | None = None
    sink_gap_end: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBlocks(Generic[Array]):
    """The pages of each of nq query tiles."""

    # int64 [nq]: pages that every query of the tile sees whole: those of sink tokens, then, `skipped` pages later, the
    # window's.
    num_full: Array
    # int64 [nq]; None in a step's lists without a window.
    skipped: Array | None = None
    # int64 [nq] and [nq, w]: the other pages that some query sees, cut by position; in a step's lists that of learned
    # sinks is one. The first num_partial of a tile's entries are valid.
    num_partial: Array
    partial_pages: Array


# Positions of a decode block on a GPU, unless pages are smaller. The kernel's tiles divide it. A CPU reads whole pages.
GPU_DECODE_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpans:
    """The blocks that each query lists, and the positions in them that it does not see.

    The positions between the sink tokens and the window are hidden. Each array is [n].
    """

    # num_blocks are listed: those of the sink tokens, then, `skipped` blocks later, the window's up to the query's.
    num_blocks: Int64Array
    skipped: Int64Array
    # Hidden positions in the block in which the window begins: gap_start to gap_end - 1.
    gap_start: Int64Array
    gap_end: Int64Array
    # Whether the last block of sink tokens is another block, in which positions after the sink tokens are hidden.
    cuts_sink_tokens: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One attention pattern over the pool of one geometry; its lists have static widths."""

    pattern: AttentionPattern
    page_size: int
    # Positions of a block that decode rows list; divides page_size.
    decode_block: int
    # Query positions of a prefill tile.
    q_block: int
    pages_per_row: int
    # Pages that plans may name, page 0 included.
    num_pages: int

    @classmethod
    def of(cls, pattern: AttentionPattern, geometry: Geometry, *, decode_block: int | None = None) -> "View":
        """The view of layers with this pattern. decode_block: at most this many positions; None: whole pages."""
        return cls(
            pattern=pattern,
            page_size=geometry.page_size,
            decode_block=min(decode_block or geometry.page_size, geometry.page_size),
            q_block=geometry.chunk_align,
            pages_per_row=geometry.pages_per_row,
            num_pages=geometry.num_pages,
        )

    @property
    def num_learned_sink_pages(self) -> int:
        """1 if the pool has an additional page. Its first slot represents the learned sinks.

        No plan can name that page, so it stays zero. Page 0 could not serve: padding writes to it and may be NaN, and a
        masked NaN would still reach every row.
        """
        return int(self.pattern.has_learned_sinks)

    @property
    def pool_pages(self) -> int:
        return self.num_pages + self.num_learned_sink_pages

    @property
    def learned_sink_slot(self) -> int | None:
        return self.num_pages * self.page_size if self.pattern.has_learned_sinks else None

    @property
    def blocks_per_page(self) -> int:
        return self.page_size // self.decode_block

    @property
    def blocks_per_row(self) -> int:
        return self.pages_per_row * self.blocks_per_page

    @property
    def is_plain(self) -> bool:
        """Whether a row lists exactly its entries of the page table."""
        return self.pattern == AttentionPattern()

    @property
    def sink_token_pages(self) -> int:
        return -(-self.pattern.sink_tokens // self.page_size)

    @property
    def full_sink_token_pages(self) -> int:
        """Pages that hold only sink tokens."""
        return self.pattern.sink_tokens // self.page_size

    @property
    def sink_token_blocks(self) -> int:
        return -(-self.pattern.sink_tokens // self.decode_block)

    @property
    def cuts_block_of_sink_tokens(self) -> bool:
        return self.pattern.sink_tokens % self.decode_block > 0

    @property
    def max_decode(self) -> int:
        """The most blocks of its sequence that a decode row lists."""
        window = self.pattern.window
        if window is None:
            return self.blocks_per_row
        return min(self.sink_token_blocks + _spanned(window, self.decode_block), self.blocks_per_row)

    @property
    def max_full(self) -> int:
        """The most pages that a tile lists as seen whole."""
        window = self.pattern.window
        if window is None:
            return self.pages_per_row
        return min((window + self.pattern.sink_tokens) // self.page_size, self.pages_per_row)

    @property
    def max_partial(self) -> int:
        """The most pages of its sequence that a tile lists as seen in part: those of its own positions, and with a
        window as many in which its queries' windows begin, and the last page of sink tokens."""
        window, per_edge = self.pattern.window, _spanned(self.q_block - 1, self.page_size)
        if window is None:
            return min(per_edge, self.pages_per_row)
        near = min(2 * per_edge, _spanned(window + self.q_block - 1, self.page_size))
        return min(near + self._cuts_page_of_sink_tokens, self.pages_per_row)

    @property
    def _cuts_page_of_sink_tokens(self) -> bool:
        return self.full_sink_token_pages < self.sink_token_pages

    def _hidden_end(self, positions: Int64Array) -> Int64Array:
        """The end of the hidden positions, which begin after the sink tokens; 0 if a query sees all positions."""
        if self.pattern.window is None:
            return np.zeros_like(positions)
        window_start = positions - self.pattern.window + 1
        return np.where(window_start > self.pattern.sink_tokens, window_start, 0)

    def decode_spans(self, positions: Int64Array) -> DecodeSpans:
        """The spans of queries at `positions` [n]."""
        hidden_end, size = self._hidden_end(positions), self.decode_block
        first_block = hidden_end // size
        skipped = np.maximum(first_block - self.sink_token_blocks, 0)
        return DecodeSpans(
            num_blocks=positions // size - skipped + 1,
            skipped=skipped,
            gap_start=np.minimum(np.maximum(self.pattern.sink_tokens, first_block * size), hidden_end),
            gap_end=hidden_end,
            cuts_sink_tokens=(hidden_end > 0) & (first_block >= self.sink_token_blocks),
        )

    def tile_spans(self, first: Int64Array, last: Int64Array) -> PrefillBlocks[Int64Array]:
        """The pages of tiles with queries at positions `first` to `last`, each [n]; w is max_partial."""
        page_size, num_sink_pages, num_whole = self.page_size, self.sink_token_pages, self.full_sink_token_pages
        last_page = last // page_size
        # The first page of the window of the tile's first query, which reaches back furthest.
        first_page = np.maximum(self._hidden_end(first) // page_size, num_sink_pages)
        # All queries see a page whole that ends before the first query and begins within the last query's window.
        first_full = np.maximum(-(-self._hidden_end(last) // page_size), num_whole)
        end_full = (first + 1) // page_size
        has_full = first_full < end_full
        num_sink_full = np.minimum(num_whole, end_full)
        # Runs of pages seen in part: those of the sink tokens, those before the full pages, and those after them.
        sees_cut_page = has_full & (first_full <= num_whole) & self._cuts_page_of_sink_tokens
        cut_start = np.where(sees_cut_page, num_sink_pages, num_sink_full)
        right_start = np.where(has_full, np.maximum(end_full, first_page), first_page)
        runs = (
            (cut_start, np.minimum(num_sink_pages, last_page + 1)),
            (first_page, np.where(has_full, first_full, first_page)),
            (right_start, last_page + 1),
        )
        partial, num_partial = self._listed(runs)
        return PrefillBlocks(
            num_full=num_sink_full + np.where(has_full, end_full - first_full, 0),
            skipped=first_full - num_whole,
            partial_pages=partial,
            num_partial=num_partial,
        )

    def _listed(self, runs: Sequence[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
        """The pages of runs, each [start, end) by [n], one after another in [n, max_partial], and their number [n]."""
        nth = np.arange(self.max_partial)
        pages, num_listed = np.zeros((runs[0][0].size, nth.size), np.int64), np.zeros_like(runs[0][0])
        for start, end in runs:
            pages = np.where(nth >= num_listed[:, None], nth + (start - num_listed)[:, None], pages)
            num_listed = num_listed + np.maximum(end - start, 0)
        # Invalid entries stay within the pages that a row can have.
        return np.clip(pages, 0, self.pages_per_row - 1), num_listed


def _spanned(num_positions: int, size: int) -> int:
    """The most pages, or blocks, of `size` positions that this number of consecutive positions touches."""
    return (num_positions + size - 2) // size + 1
