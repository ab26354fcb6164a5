"""Lays out what the attention kernels of a step read: the page lists of decode rows and of the chunks' query tiles.

Does all page arithmetic of a step, on the host with numpy. A token slot is the index of a token's entry in the KV pool:
page * page_size + offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import Array, HostArray, Int64Array
from gpu_worker.attention.blocks import DecodeBlocks, PrefillBlocks
from gpu_worker.attention.views import View
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.wire.frames import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePart(Generic[Array]):
    """The decode rows. Their attention kernel has `bucket` attention slots. Every array is int64."""

    bucket: int
    # [decode tokens]: the row and the attention slot of each packed token; row 0 is padding.
    rows: Array
    slots: Array
    # [bucket]: the line of the device's page table (not a row of the plan) that each attention slot reads. None if slot
    # i reads line i.
    list_slots: Array | None
    # [bucket]: for each attention slot, the token slot of the newest position that it attends to, and the first token
    # slot after the decode block that contains it.
    last_slot: Array
    block_end: Array
    # One for each attention pattern.
    blocks: tuple[DecodeBlocks[Array], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPart(Generic[Array]):
    """Chunks, each aligned to the query tile; every array is int64."""

    bucket: int
    # One for each attention pattern.
    blocks: tuple[PrefillBlocks[Array], ...]
    # [tiles]: the row of the device's page table that each tile reads.
    slots: Array
    # [bucket]: the position of each query, -1 for padding.
    q_positions: Array
    # [chunk tokens]: the index of each packed token along the query axis.
    places: Array


def lay_out_decode(
    plan: Plan, tables: RowTables, slot_of_row: Int64Array, bucket: int, views: Sequence[View], *, is_padded: bool
) -> DecodePart[HostArray]:
    rows = plan.decode_rows.astype(np.int64)
    slots, list_slots = slot_of_row[rows], None
    if is_padded:
        rows = np.concatenate([rows, np.zeros(bucket - rows.size, np.int64)])
        slots, list_slots = np.arange(bucket, dtype=np.int64), slot_of_row[rows]
    positions = tables.position[rows]
    last_slot = token_slots(tables, rows, positions)
    return DecodePart(
        bucket=bucket,
        rows=rows,
        slots=slots,
        list_slots=list_slots,
        last_slot=_scattered(slots, last_slot, bucket),
        block_end=_scattered(slots, _block_start(last_slot, views[0]) + views[0].decode_block, bucket),
        blocks=tuple(_decode_blocks(view, tables, rows, positions, slots, bucket) for view in views),
    )


def _decode_blocks(
    view: View, tables: RowTables, rows: Int64Array, positions: Int64Array, slots: Int64Array, bucket: int
) -> DecodeBlocks[HostArray]:
    if view.pattern.window is None:
        num_listed = positions // view.decode_block + (1 + view.num_learned_sink_pages)
        return DecodeBlocks(num_blocks=_scattered(slots, num_listed * (rows > 0), bucket))
    spans = view.decode_spans(positions)
    num_blocks = _scattered(slots, (spans.num_blocks + view.num_learned_sink_pages) * (rows > 0), bucket)
    gap_start = token_slots(tables, rows, spans.gap_start)
    blocks = DecodeBlocks(
        num_blocks=num_blocks,
        skipped=_scattered(slots, spans.skipped, bucket),
        gap_start=_scattered(slots, gap_start, bucket),
        gap_end=_scattered(slots, gap_start + spans.gap_end - spans.gap_start, bucket),
    )
    if not view.cuts_block_of_sink_tokens:
        return blocks
    sink_gap_start = token_slots(tables, rows, np.full_like(rows, view.pattern.sink_tokens))
    sink_gap_end = _block_start(sink_gap_start, view) + view.decode_block * spans.cuts_sink_tokens
    return replace(
        blocks,
        sink_gap_start=_scattered(slots, sink_gap_start, bucket),
        sink_gap_end=_scattered(slots, sink_gap_end, bucket),
    )


def token_slots(tables: RowTables, rows: Int64Array, positions: Int64Array) -> Int64Array:
    """Returns the token slot of each row's position."""
    page_size = tables.geometry.page_size
    return tables.page_table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size


def _block_start(token_slots: Int64Array, view: View) -> Int64Array:
    return token_slots // view.decode_block * view.decode_block


def _scattered(places: Int64Array, values: NDArray[np.integer], size: int) -> Int64Array:
    out = np.zeros(size, np.int64)
    out[places] = values
    return out


def lay_out_prefill(
    plan: Plan, tables: RowTables, slot_of_row: Int64Array, bucket: int, views: Sequence[View], num_tokens: int
) -> PrefillPart[HostArray]:
    """`num_tokens`: packed tokens of the chunks, padding included; at most `bucket`, their query positions."""
    q_block = tables.geometry.chunk_align
    starts, counts = plan.chunk_starts.astype(np.int64), plan.chunk_counts.astype(np.int64)
    tiles = -(-counts // q_block)
    num_tiles = int(tiles.sum())
    nth_tile = np.arange(num_tiles) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    rows = np.repeat(plan.chunk_rows.astype(np.int64), tiles)
    first = np.repeat(starts, tiles) + nth_tile * q_block
    last = np.minimum(first + q_block, np.repeat(starts + counts, tiles)) - 1
    slots = np.zeros(bucket // q_block, np.int64)
    slots[:num_tiles] = slot_of_row[rows]
    # [tiles, positions of a tile]
    positions = first[:, None] + np.arange(q_block)
    is_query = positions <= last[:, None]
    q_positions = np.full(bucket, -1, np.int64)
    q_positions[: positions.size] = np.where(is_query, positions, -1).reshape(-1)
    # Padding tokens take places of masked queries. There are enough: a chunk has at most as many tokens as queries.
    places, masked = np.flatnonzero(q_positions >= 0), np.flatnonzero(q_positions < 0)
    return PrefillPart(
        bucket=bucket,
        places=np.concatenate([places, masked[: num_tokens - places.size]]),
        slots=slots,
        q_positions=q_positions,
        blocks=tuple(_prefill_blocks(view, tables, rows, first, last, slots.size) for view in views),
    )


def _prefill_blocks(
    view: View, tables: RowTables, rows: Int64Array, first: Int64Array, last: Int64Array, num_tiles: int
) -> PrefillBlocks[HostArray]:
    """`rows`, `first`, `last`: the row of each tile except padding, and the positions of its first and last query."""
    spans, used, sinks = view.tile_spans(first, last), rows.size, view.num_learned_sink_pages
    num_partial = np.zeros(num_tiles, np.int64)
    num_partial[:used] = spans.num_partial + sinks
    partial_pages = np.zeros((num_tiles, sinks + view.max_partial), np.int64)
    # The page after the pool's pages contains the learned sinks.
    partial_pages[:, :sinks] = view.num_pages
    partial_pages[:used, sinks:] = tables.page_table[rows[:, None], spans.partial]
    skipped = None
    if view.pattern.window is not None:
        skipped = _scattered(np.arange(used), spans.skipped, num_tiles)
    return PrefillBlocks(
        num_full=_scattered(np.arange(used), spans.num_full, num_tiles),
        skipped=skipped,
        num_partial=num_partial,
        partial_pages=partial_pages,
    )
