"""Lays out what the attention kernels of a step read: the page lists of decode rows and of the chunks' query tiles.

Does all page arithmetic of a step, on the host with numpy. A token slot is the index of a token's entry in the KV pool:
page * page_size + offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import Array, HostArray, Int64Array, Space
from gpu_worker.attention.views import DecodeBlocks, PrefillBlocks, View
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.wire.frames import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePart(Generic[Array]):
    """The decode rows; every array is int64 [rows], padding included, and so has a place for each attention slot."""

    # The row of each packed token, which is its line of the page table; row 0 is padding.
    rows: Array
    # For each attention slot, the token slot of the newest position that it attends to, and the first token slot after
    # the decode block that contains it. None if no kernel reads block lists.
    last_slot: Array | None
    block_end: Array | None
    # One for each attention pattern; empty if no kernel reads block lists.
    blocks: tuple[DecodeBlocks[Array], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPart(Generic[Array]):
    """Chunks, each aligned to the query tile; every array is int64."""

    # One for each attention pattern; empty if no kernel reads block lists.
    blocks: tuple[PrefillBlocks[Array], ...]
    # [tiles]: the row of each tile, which is its line of the page table; row 0 is padding.
    rows: Array
    # [queries]: the position of each query, -1 for padding.
    q_positions: Array
    # [chunk tokens]: the index of each packed token along the query axis.
    places: Array


def allocated_decode(num_rows: int, views: Sequence[View], space: Space) -> DecodePart[HostArray]:
    """Returns a part for `num_rows` rows, padding included, with undefined numbers.

    views: empty if no kernel reads block lists, as in every function of this module.
    """
    return DecodePart(
        rows=space.int64(num_rows),
        last_slot=space.int64(num_rows) if views else None,
        block_end=space.int64(num_rows) if views else None,
        blocks=tuple(_allocated_blocks(view, num_rows, space) for view in views),
    )


def _allocated_blocks(view: View, num_rows: int, space: Space) -> DecodeBlocks[HostArray]:
    num_blocks = space.int64(num_rows)
    if view.pattern.window is None:
        return DecodeBlocks(num_blocks=num_blocks)
    cuts = view.cuts_block_of_sink_tokens
    return DecodeBlocks(
        num_blocks=num_blocks,
        skipped=space.int64(num_rows),
        gap_start=space.int64(num_rows),
        gap_end=space.int64(num_rows),
        sink_gap_start=space.int64(num_rows) if cuts else None,
        sink_gap_end=space.int64(num_rows) if cuts else None,
    )


def write_decode(
    part: DecodePart[HostArray],
    positions: Int64Array,
    kv_slots: Int64Array,
    plan: Plan,
    tables: RowTables,
    views: Sequence[View],
) -> None:
    """Writes the part, and the positions and token slots of its packed tokens."""
    num, rows = plan.decode_rows.size, part.rows
    rows[:num] = plan.decode_rows
    rows[num:] = 0
    # Row 0 is always at position 0.
    tables.position.take(rows, out=positions, mode="clip")
    token_slots(tables, rows, positions, into=kv_slots)
    if not views:
        return
    assert part.last_slot is not None and part.block_end is not None
    part.last_slot[:] = kv_slots
    part.block_end[:] = _block_end(kv_slots, views[0])
    for view, blocks in zip(views, part.blocks, strict=True):
        _write_decode_blocks(blocks, part, positions, tables, view)
        blocks.num_blocks[num:] = 0


def _write_decode_blocks(
    blocks: DecodeBlocks[HostArray], part: DecodePart[HostArray], positions: Int64Array, tables: RowTables, view: View
) -> None:
    if view.pattern.window is None:
        blocks.num_blocks[:] = positions // view.decode_block + (1 + view.num_learned_sink_pages)
        return
    assert blocks.skipped is not None and blocks.gap_start is not None and blocks.gap_end is not None
    spans = view.decode_spans(positions)
    gap_start = token_slots(tables, part.rows, spans.gap_start)
    blocks.num_blocks[:] = spans.num_blocks + view.num_learned_sink_pages
    blocks.skipped[:] = spans.skipped
    blocks.gap_start[:] = gap_start
    blocks.gap_end[:] = gap_start + spans.gap_end - spans.gap_start
    if blocks.sink_gap_start is not None and blocks.sink_gap_end is not None:
        sink_gap_start = token_slots(tables, part.rows, np.full_like(part.rows, view.pattern.sink_tokens))
        sink_gap_end = _block_end(sink_gap_start, view) - view.decode_block * ~spans.cuts_sink_tokens
        blocks.sink_gap_start[:] = sink_gap_start
        blocks.sink_gap_end[:] = sink_gap_end


def token_slots(
    tables: RowTables, rows: Int64Array, positions: Int64Array, into: Int64Array | None = None
) -> Int64Array:
    """Returns the token slot of each row's position, in the array `into` if it is given."""
    cols = positions >> tables.page_shift
    # page * page_size + position - col * page_size
    pages = tables.page_table[rows, cols]
    return np.add((pages - cols) << tables.page_shift, positions, out=into)


def _block_end(token_slots: Int64Array, view: View) -> Int64Array:
    """Returns the first token slot after the decode block of each."""
    return (token_slots | (view.decode_block - 1)) + 1


def allocated_prefill(
    num_queries: int, num_tokens: int, q_block: int, views: Sequence[View], space: Space
) -> PrefillPart[HostArray]:
    """Returns a part for `num_tokens` packed tokens, padding included, with undefined numbers.

    There are at most `num_queries` tokens.
    """
    tiles = num_queries // q_block
    widths = [view.num_learned_sink_pages + view.max_partial for view in views]
    blocks = tuple(
        PrefillBlocks(
            num_full=space.int64(tiles),
            skipped=None if view.pattern.window is None else space.int64(tiles),
            num_partial=space.int64(tiles),
            partial_pages=space.int64(tiles * width).reshape(tiles, width),
        )
        for view, width in zip(views, widths, strict=True)
    )
    return PrefillPart(
        places=space.int64(num_tokens),
        rows=space.int64(tiles),
        q_positions=space.int64(num_queries),
        blocks=blocks,
    )


def write_prefill(part: PrefillPart[HostArray], plan: Plan, tables: RowTables, views: Sequence[View]) -> None:
    q_block = tables.geometry.chunk_align
    starts, counts = plan.chunk_starts.astype(np.int64), plan.chunk_counts.astype(np.int64)
    tiles = -(-counts // q_block)
    num_tiles = int(tiles.sum())
    nth_tile = np.arange(num_tiles) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    rows = np.repeat(plan.chunk_rows.astype(np.int64), tiles)
    first = np.repeat(starts, tiles) + nth_tile * q_block
    last = np.minimum(first + q_block, np.repeat(starts + counts, tiles)) - 1
    # [tiles, positions of a tile]
    positions = first[:, None] + np.arange(q_block)
    _extend(part.q_positions, np.where(positions <= last[:, None], positions, -1).reshape(-1), -1)
    _extend(part.rows, rows, 0)
    # Padding tokens take places of masked queries. There are enough: a chunk has at most as many tokens as queries.
    is_query = part.q_positions >= 0
    places = np.flatnonzero(is_query)
    part.places[: places.size] = places
    if places.size < part.places.size:
        part.places[places.size :] = np.flatnonzero(~is_query)[: part.places.size - places.size]
    for view, blocks in zip(views, part.blocks, strict=True):
        _write_prefill_blocks(blocks, tables, rows, first, last, view)


def _extend(into: Int64Array, values: NDArray[np.integer], filler: int) -> None:
    """Writes `values`, and `filler` after them."""
    into[: values.size] = values
    into[values.size :] = filler


def _write_prefill_blocks(
    blocks: PrefillBlocks[HostArray],
    tables: RowTables,
    rows: Int64Array,
    first: Int64Array,
    last: Int64Array,
    view: View,
) -> None:
    """`rows`, `first`, `last`: the row of each tile except padding, and the positions of its first and last query."""
    spans, used, sinks = view.tile_spans(first, last), rows.size, view.num_learned_sink_pages
    _extend(blocks.num_full, spans.num_full, 0)
    _extend(blocks.num_partial, spans.num_partial + sinks, 0)
    if blocks.skipped is not None:
        assert spans.skipped is not None
        _extend(blocks.skipped, spans.skipped, 0)
    # The page after the pool's pages contains the learned sinks.
    blocks.partial_pages[:, :sinks] = view.num_pages
    blocks.partial_pages[:used, sinks:] = tables.page_table[rows[:, None], spans.partial_pages]
    blocks.partial_pages[used:, sinks:] = 0
