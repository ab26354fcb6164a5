"""One plan as the arrays its step needs: which token goes where, what each kernel reads, which rows sample.

Owns the packing (decode rows, then chunks, then padding) and all page arithmetic of a step. Host
only: numpy in, numpy out, no torch; the host's tables know everything but the sampled tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.geometry import align_up
from gpu_worker.samples import SamplePart, lay_out_samples
from gpu_worker.shapes import Shapes, bucket_for
from gpu_worker.slots import RowTables, TableEdits
from gpu_worker.wire import Plan

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePart:
    """Rows that compute one position; `bucket` slots of attention."""

    bucket: int
    # int64 [decode tokens]: the row and the slot of each packed token (row 0: padding).
    rows: Int64Array
    slots: Int64Array
    # int64 [bucket]: the page list each slot reads; None where the kernel reads the page table itself.
    list_slots: Int64Array | None
    # int64 [bucket]: pages of each slot (0: none), the last token slot it sees, and the end of that slot's page.
    num_blocks: Int64Array
    last_slot: Int64Array
    page_end: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPart:
    """Chunks, each aligned to the query tile; see block_mask.PrefillBlocks."""

    bucket: int
    # int64 [chunk tokens]: each packed token's place along the query axis.
    places: Int64Array
    slots: Int64Array
    num_full: Int64Array
    num_partial: Int64Array
    partial_pages: Int64Array
    q_positions: Int64Array


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
    plan: Plan, edits: TableEdits, tables: RowTables, slot_of_row: Int64Array, shapes: Shapes, max_partial: int
) -> StepLayout:
    """The step of `plan`; `tables` have its differences applied and its rows not yet advanced."""
    page_size = tables.geometry.page_size
    decode = _lay_out_decode(plan, tables, slot_of_row, shapes) if plan.decode_rows.size else None
    prefill = _lay_out_prefill(plan, tables, slot_of_row, shapes, max_partial) if plan.chunk_rows.size else None
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
    pages = tables.page_table[all_rows, all_positions // page_size].astype(np.int64)
    return StepLayout(
        edits=edits,
        token_ids=np.concatenate(ids),
        positions=all_positions,
        kv_slots=pages * page_size + all_positions % page_size,
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


def _lay_out_decode(plan: Plan, tables: RowTables, slot_of_row: Int64Array, shapes: Shapes) -> DecodePart:
    rows = plan.decode_rows.astype(np.int64)
    bucket = bucket_for(shapes.decode_buckets, rows.size)
    slots, list_slots = slot_of_row[rows], None
    if shapes.token_multiple is not None:
        rows = np.concatenate([rows, np.zeros(bucket - rows.size, np.int64)])
        slots, list_slots = np.arange(bucket, dtype=np.int64), slot_of_row[rows]
    page_size, positions = tables.geometry.page_size, tables.position[rows]
    cols = positions // page_size
    last_slot = tables.page_table[rows, cols].astype(np.int64) * page_size + positions % page_size
    return DecodePart(
        bucket=bucket,
        rows=rows,
        slots=slots,
        list_slots=list_slots,
        num_blocks=_scattered(slots, (cols + 1) * (rows > 0), bucket),
        last_slot=_scattered(slots, last_slot, bucket),
        page_end=_scattered(slots, (last_slot // page_size + 1) * page_size, bucket),
    )


def _scattered(places: Int64Array, values: NDArray[np.integer], size: int) -> Int64Array:
    out = np.zeros(size, np.int64)
    out[places] = values
    return out


def _lay_out_prefill(
    plan: Plan, tables: RowTables, slot_of_row: Int64Array, shapes: Shapes, max_partial: int
) -> PrefillPart:
    page_size, q_block = tables.geometry.page_size, tables.geometry.chunk_align
    counts = plan.chunk_counts.astype(np.int64)
    tiles = -(-counts // q_block)
    bucket = bucket_for(shapes.prefill_buckets, int(tiles.sum()) * q_block)
    num_tiles = bucket // q_block
    first_tiles = np.cumsum(tiles) - tiles
    places = [first * q_block + np.arange(count) for first, count in zip(first_tiles, counts, strict=True)]
    part = PrefillPart(
        bucket=bucket,
        places=np.concatenate(places),
        slots=np.zeros(num_tiles, np.int64),
        num_full=np.zeros(num_tiles, np.int64),
        num_partial=np.zeros(num_tiles, np.int64),
        partial_pages=np.zeros((num_tiles, max_partial), np.int64),
        q_positions=np.full(bucket, -1, np.int64),
    )
    starts = plan.chunk_starts.astype(np.int64)
    for row, start, count, first_tile in zip(plan.chunk_rows, starts, counts, first_tiles, strict=True):
        place = first_tile * q_block
        part.q_positions[place : place + count] = np.arange(start, start + count)
        for tile in range(-(-count // q_block)):
            first = start + tile * q_block
            last = min(first + q_block, start + count) - 1
            # Every query of the tile sees the pages that end at or before its first position.
            num_full = (first + 1) // page_size
            num_partial = last // page_size - num_full + 1
            at = first_tile + tile
            part.slots[at] = slot_of_row[row]
            part.num_full[at], part.num_partial[at] = num_full, num_partial
            part.partial_pages[at, :num_partial] = tables.page_table[row, num_full : num_full + num_partial]
    return part
