"""One plan as the arrays its step needs: which token goes where, what each kernel reads, which rows sample.

Owns the packing (decode rows, then chunks, then padding) and all page arithmetic of a step. Host
only: numpy in, numpy out, no torch; the host's tables know everything but the sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpu_worker.attention.views import Int64Array, View
from gpu_worker.geometry import align_up
from gpu_worker.step.row_tables import RowTables, TableEdits
from gpu_worker.step.samples import SamplePart, lay_out_samples
from gpu_worker.step.shapes import Shapes, bucket_for
from gpu_worker.wire.frames import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    """What the slots list in layers of one visibility; see block_mask.DecodeBlocks. All int64 [bucket]."""

    num_blocks: Int64Array
    # None without a window.
    skipped: Int64Array | None = None
    gap_start: Int64Array | None = None
    gap_end: Int64Array | None = None
    # None where no leading positions end inside a page.
    leading_gap_start: Int64Array | None = None
    leading_gap_end: Int64Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePart:
    """Rows that compute one position; `bucket` slots of attention."""

    bucket: int
    # int64 [decode tokens]: the row and the slot of each packed token (row 0: padding).
    rows: Int64Array
    slots: Int64Array
    # int64 [bucket]: the slot whose part of the page table each slot lists; None: its own.
    list_slots: Int64Array | None
    # int64 [bucket]: the last token slot that each slot sees, and the end of that slot's page.
    last_slot: Int64Array
    page_end: Int64Array
    views: tuple[DecodeView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView:
    """What the tiles list in layers of one visibility; see block_mask.PrefillBlocks."""

    num_full: Int64Array
    # None without a window.
    skipped: Int64Array | None
    num_partial: Int64Array
    partial_pages: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPart:
    """Chunks, each aligned to the query tile; see block_mask.PrefillBlocks."""

    bucket: int
    # int64 [chunk tokens]: each packed token's place along the query axis.
    places: Int64Array
    slots: Int64Array
    q_positions: Int64Array
    views: tuple[PrefillView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Everything the device must be told for one step."""

    edits: TableEdits
    # int64 [tokens]: ids (-1: the one the device sampled last for the row), positions, token slots of the pool.
    token_ids: Int64Array
    positions: Int64Array
    kv_slots: Int64Array
    decode: DecodePart | None
    prefill: PrefillPart | None
    samples: SamplePart


def lay_out(
    plan: Plan,
    edits: TableEdits,
    tables: RowTables,
    slot_of_row: Int64Array,
    shapes: Shapes,
    views: Sequence[View],
) -> StepLayout:
    """The step of `plan`; `tables` have its differences applied and its rows not yet advanced."""
    decode = _lay_out_decode(plan, tables, slot_of_row, shapes, views) if plan.decode_rows.size else None
    prefill = _lay_out_prefill(plan, tables, slot_of_row, shapes, views) if plan.chunk_rows.size else None
    rows = [decode.rows] if decode else []
    positions = [tables.position[decode.rows] * (decode.rows > 0)] if decode else []
    ids = [_ids_of_decode_rows(decode.rows, tables)] if decode else []
    for row, start, count in zip(plan.chunk_rows, plan.chunk_starts, plan.chunk_counts, strict=True):
        rows.append(np.full(count, row, np.int64))
        positions.append(np.arange(start, start + count, dtype=np.int64))
        ids.append(tables.tokens[int(row)][start : start + count].astype(np.int64))
    num_tokens = sum(part.size for part in rows)
    if shapes.token_multiple is not None and prefill is not None:
        padding = np.zeros(align_up(num_tokens, shapes.token_multiple) - num_tokens, np.int64)
        rows, positions, ids = [*rows, padding], [*positions, padding], [*ids, padding]
    all_rows, all_positions = np.concatenate(rows), np.concatenate(positions)
    return StepLayout(
        edits=edits,
        token_ids=np.concatenate(ids),
        positions=all_positions,
        # Padding is row 0 at position 0, which has the first slot of page 0.
        kv_slots=_token_slots(tables, all_rows, all_positions),
        decode=decode,
        prefill=prefill,
        samples=lay_out_samples(plan, tables, decode.rows.size if decode else 0, shapes),
    )


def _ids_of_decode_rows(rows: Int64Array, tables: RowTables) -> Int64Array:
    """Each row's token where it came with the row, -1 where it was sampled since, 0 for padding."""
    ids = np.where(rows > 0, -1, 0)
    for i in np.flatnonzero(tables.num_known[rows] == tables.num_started[rows]):
        ids[i] = tables.tokens[int(rows[i])][-1] if rows[i] else 0
    return ids


def _lay_out_decode(
    plan: Plan, tables: RowTables, slot_of_row: Int64Array, shapes: Shapes, views: Sequence[View]
) -> DecodePart:
    rows = plan.decode_rows.astype(np.int64)
    bucket = bucket_for(shapes.decode_buckets, rows.size)
    slots, list_slots = slot_of_row[rows], None
    if shapes.token_multiple is not None:
        rows = np.concatenate([rows, np.zeros(bucket - rows.size, np.int64)])
        slots, list_slots = np.arange(bucket, dtype=np.int64), slot_of_row[rows]
    positions = tables.position[rows]
    last_slot = _token_slots(tables, rows, positions)
    return DecodePart(
        bucket=bucket,
        rows=rows,
        slots=slots,
        list_slots=list_slots,
        last_slot=_scattered(slots, last_slot, bucket),
        page_end=_scattered(slots, _page_start(last_slot, tables) + tables.geometry.page_size, bucket),
        views=tuple(_decode_view(view, tables, rows, positions, slots, bucket) for view in views),
    )


def _decode_view(
    view: View, tables: RowTables, rows: Int64Array, positions: Int64Array, slots: Int64Array, bucket: int
) -> DecodeView:
    if view.visibility.window is None:
        num_pages = positions // view.page_size + (1 + view.num_sink_pages)
        return DecodeView(num_blocks=_scattered(slots, num_pages * (rows > 0), bucket))
    spans = view.decode_spans(positions)
    num_blocks = _scattered(slots, (spans.num_pages + view.num_sink_pages) * (rows > 0), bucket)
    gap_start = _token_slots(tables, rows, spans.gap_start)
    decode_view = DecodeView(
        num_blocks=num_blocks,
        skipped=_scattered(slots, spans.skipped, bucket),
        gap_start=_scattered(slots, gap_start, bucket),
        gap_end=_scattered(slots, gap_start + spans.gap_end - spans.gap_start, bucket),
    )
    if not view.cuts_leading:
        return decode_view
    leading_gap_start = _token_slots(tables, rows, np.full_like(rows, view.visibility.leading))
    leading_gap_end = _page_start(leading_gap_start, tables) + view.page_size * spans.cuts_leading
    return replace(
        decode_view,
        leading_gap_start=_scattered(slots, leading_gap_start, bucket),
        leading_gap_end=_scattered(slots, leading_gap_end, bucket),
    )


def _token_slots(tables: RowTables, rows: Int64Array, positions: Int64Array) -> Int64Array:
    """Where in the pool each row keeps a position."""
    page_size = tables.geometry.page_size
    return tables.page_table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size


def _page_start(token_slots: Int64Array, tables: RowTables) -> Int64Array:
    return token_slots // tables.geometry.page_size * tables.geometry.page_size


def _scattered(places: Int64Array, values: NDArray[np.integer], size: int) -> Int64Array:
    out = np.zeros(size, np.int64)
    out[places] = values
    return out


def _lay_out_prefill(
    plan: Plan, tables: RowTables, slot_of_row: Int64Array, shapes: Shapes, views: Sequence[View]
) -> PrefillPart:
    q_block = tables.geometry.chunk_align
    starts, counts = plan.chunk_starts.astype(np.int64), plan.chunk_counts.astype(np.int64)
    tiles = -(-counts // q_block)
    num_tiles = int(tiles.sum())
    bucket = bucket_for(shapes.prefill_buckets, num_tiles * q_block)
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
    return PrefillPart(
        bucket=bucket,
        places=np.flatnonzero(is_query),
        slots=slots,
        q_positions=q_positions,
        views=tuple(_prefill_view(view, tables, rows, first, last, slots.size) for view in views),
    )


def _prefill_view(
    view: View, tables: RowTables, rows: Int64Array, first: Int64Array, last: Int64Array, num_tiles: int
) -> PrefillView:
    """rows, first, last: the row of each tile in use and the positions of its first and last query."""
    spans, used, sinks = view.tile_spans(first, last), rows.size, view.num_sink_pages
    num_partial = np.zeros(num_tiles, np.int64)
    num_partial[:used] = spans.num_partial + sinks
    partial_pages = np.zeros((num_tiles, sinks + view.max_partial), np.int64)
    # The pool's last page, where it is the sinks'.
    partial_pages[:, :sinks] = view.num_pages
    partial_pages[:used, sinks:] = tables.page_table[rows[:, None], spans.partial]
    skipped = None
    if view.visibility.window is not None:
        skipped = _scattered(np.arange(used), spans.skipped, num_tiles)
    return PrefillView(
        num_full=_scattered(np.arange(used), spans.num_full, num_tiles),
        skipped=skipped,
        num_partial=num_partial,
        partial_pages=partial_pages,
    )
