"""Lays out what the attention kernels of a step read: the page lists of decode rows and of the chunks' query tiles.

Does all page arithmetic of a step, on the host with numpy. A token slot is the index of a token's entry in the KV pool:
page * page_size + offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import Array, HostArray, Int64Array, Space
from gpu_worker.attention.blocks import DecodeBlocks, PrefillBlocks
from gpu_worker.attention.views import View
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.wire.frames import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePart(Generic[Array]):
    """The decode rows. Their attention kernel has `bucket` attention slots. Every array is int64."""

    bucket: int
    # [decode tokens]: the row and the attention slot of each packed token; row 0 is padding. No slots: token i has slot
    # i.
    rows: Array
    slots: Array | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSlots:
    """The attention slots of a step's decode rows, on the host."""

    # [decode tokens]: row 0 is padding.
    rows: Int64Array
    # [decode tokens]; None if the i-th token has slot i.
    slots: Int64Array | None
    # [bucket]; None if slot i reads line i of the device's page table.
    list_slots: Int64Array | None
    bucket: int
    num_idle: int

    @classmethod
    def of(cls, plan: Plan, slot_of_row: Int64Array, bucket: int, space: Space, *, is_padded: bool) -> "DecodeSlots":
        """In a padded step every slot has a token, and idle slots are those of row 0, at the end."""
        num = plan.decode_rows.size
        rows = space.int64(bucket if is_padded else num)
        rows[:num] = plan.decode_rows
        rows[num:] = 0
        slots = list_slots = None
        if is_padded:
            list_slots = space.int64(bucket)
            list_slots[:] = slot_of_row[rows]
        else:
            slots = slot_of_row[rows]
        return cls(rows=rows, slots=slots, list_slots=list_slots, bucket=bucket, num_idle=rows.size - num)

    def placed(self, values: NDArray[np.integer], space: Space) -> Int64Array:
        """Returns values of the tokens as those of the slots; slots without a token get 0."""
        out = space.int64(self.bucket)
        if self.slots is None:
            out[:] = values
        else:
            out[:] = 0
            out[self.slots] = values
        return out

    def placed_if_used(self, values: Int64Array, space: Space) -> Int64Array:
        """The same, but idle slots get 0."""
        out = self.placed(values, space)
        if self.num_idle:
            out[-self.num_idle :] = 0
        return out


def lay_out_decode(
    slots: DecodeSlots,
    positions: Int64Array,
    kv_slots: Int64Array,
    tables: RowTables,
    views: Sequence[View],
    space: Space,
) -> DecodePart[HostArray]:
    """`positions` and `kv_slots` [decode tokens]: the position that each row computes, and its token slot."""
    return DecodePart(
        bucket=slots.bucket,
        rows=slots.rows,
        slots=slots.slots,
        list_slots=slots.list_slots,
        last_slot=slots.placed(kv_slots, space),
        block_end=slots.placed(_block_end(kv_slots, views[0]), space),
        blocks=tuple([_decode_blocks(view, slots, positions, tables, space) for view in views]),
    )


def _decode_blocks(
    view: View, slots: DecodeSlots, positions: Int64Array, tables: RowTables, space: Space
) -> DecodeBlocks[HostArray]:
    if view.pattern.window is None:
        num_listed = positions // view.decode_block
        num_listed += 1 + view.num_learned_sink_pages
        return DecodeBlocks(num_blocks=slots.placed_if_used(num_listed, space))
    spans = view.decode_spans(positions)
    num_blocks = slots.placed_if_used(spans.num_blocks + view.num_learned_sink_pages, space)
    gap_start = token_slots(tables, slots.rows, spans.gap_start)
    blocks = DecodeBlocks(
        num_blocks=num_blocks,
        skipped=slots.placed(spans.skipped, space),
        gap_start=slots.placed(gap_start, space),
        gap_end=slots.placed(gap_start + spans.gap_end - spans.gap_start, space),
    )
    if not view.cuts_block_of_sink_tokens:
        return blocks
    sink_gap_start = token_slots(tables, slots.rows, np.full_like(slots.rows, view.pattern.sink_tokens))
    sink_gap_end = _block_end(sink_gap_start, view) - view.decode_block * ~spans.cuts_sink_tokens
    return replace(
        blocks,
        sink_gap_start=slots.placed(sink_gap_start, space),
        sink_gap_end=slots.placed(sink_gap_end, space),
    )


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


def _copied(values: NDArray[np.integer], space: Space) -> Int64Array:
    out = space.int64(values.size)
    out[:] = values
    return out


def _extended(values: NDArray[np.integer], size: int, filler: int, space: Space) -> Int64Array:
    """Returns `values` and then `filler`, [size]."""
    out = space.int64(size)
    out[: values.size] = values
    out[values.size :] = filler
    return out


def lay_out_prefill(
    plan: Plan,
    tables: RowTables,
    slot_of_row: Int64Array,
    bucket: int,
    views: Sequence[View],
    num_tokens: int,
    space: Space,
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
    # [tiles, positions of a tile]
    positions = first[:, None] + np.arange(q_block)
    queries = np.where(positions <= last[:, None], positions, -1).reshape(-1)
    q_positions = _extended(queries, bucket, -1, space)
    # Padding tokens take places of masked queries. There are enough: a chunk has at most as many tokens as queries.
    is_query = q_positions >= 0
    places, masked = np.flatnonzero(is_query), np.flatnonzero(~is_query)
    max_tiles = bucket // q_block
    return PrefillPart(
        bucket=bucket,
        places=_copied(np.concatenate([places, masked[: num_tokens - places.size]]), space),
        slots=_extended(slot_of_row[rows], max_tiles, 0, space),
        q_positions=q_positions,
        blocks=tuple(_prefill_blocks(view, tables, rows, first, last, max_tiles, space) for view in views),
    )


def _prefill_blocks(
    view: View,
    tables: RowTables,
    rows: Int64Array,
    first: Int64Array,
    last: Int64Array,
    num_tiles: int,
    space: Space,
) -> PrefillBlocks[HostArray]:
    """`rows`, `first`, `last`: the row of each tile except padding, and the positions of its first and last query."""
    spans, used, sinks = view.tile_spans(first, last), rows.size, view.num_learned_sink_pages
    width = sinks + view.max_partial
    partial_pages = space.int64(num_tiles * width).reshape(num_tiles, width)
    # The page after the pool's pages contains the learned sinks.
    partial_pages[:, :sinks] = view.num_pages
    partial_pages[:used, sinks:] = tables.page_table[rows[:, None], spans.partial]
    partial_pages[used:, sinks:] = 0
    return PrefillBlocks(
        num_full=_extended(spans.num_full, num_tiles, 0, space),
        skipped=None if view.pattern.window is None else _extended(spans.skipped, num_tiles, 0, space),
        num_partial=_extended(spans.num_partial + sinks, num_tiles, 0, space),
        partial_pages=partial_pages,
    )
