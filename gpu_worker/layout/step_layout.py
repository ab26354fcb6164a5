"""Lays a plan out as the arrays of its step: packed tokens and their token slots, page lists, rows that sample.

The module packs decode rows, then chunks, then padding, on the host with numpy. The host does not know the sampled
tokens, so the device fills in their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from gpu_worker.arrays import Array, HostArray, Int64Array
from gpu_worker.attention.views import View
from gpu_worker.layout.attention_parts import DecodePart, PrefillPart, lay_out_decode, lay_out_prefill, token_slots
from gpu_worker.layout.row_tables import RowTables, SlotEdits, TableEdits
from gpu_worker.layout.samples import SampleExtras, Samples, draws, lay_out_samples
from gpu_worker.layout.shapes import Shapes, StepShape
from gpu_worker.wire.frames import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(Generic[Array]):
    """What masks, model and sampling of a step read. In padded steps the shape decides the size of every array."""

    # int64 [tokens]: ids (-1: the token that the device sampled last for the row), positions, token slots.
    token_ids: Array
    positions: Array
    kv_slots: Array
    decode: DecodePart[Array] | None
    prefill: PrefillPart[Array] | None
    samples: Samples[Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtras(Generic[Array]):
    """What only some steps have: entries of the page table, and what changes or adds to sampling."""

    edits: SlotEdits[Array] | None
    sampling: SampleExtras[Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout(Generic[Array]):
    """The arrays of one step."""

    shape: StepShape
    # Samples without padding.
    num_samples: int
    inputs: StepInputs[Array]
    extras: StepExtras[Array]


def lay_out(
    plan: Plan,
    edits: TableEdits,
    tables: RowTables,
    slot_of_row: Int64Array,
    shapes: Shapes,
    views: Sequence[View],
) -> StepLayout[HostArray]:
    """Returns the arrays of `plan`. `tables` have its starts and appends, and the positions before the step."""
    tiles = -(-plan.chunk_counts.astype(np.int64) // tables.geometry.chunk_align)
    num_decode, num_samples = plan.decode_rows.size, plan.decode_rows.size + int(plan.chunk_samples.sum())
    shape = shapes.fitting(
        StepShape(
            decode=num_decode,
            prefill=int(tiles.sum()) * tables.geometry.chunk_align,
            tokens=num_decode + int(plan.chunk_counts.sum()),
            samples=num_samples,
            draws=draws(plan, tables) if shapes.is_padded else False,
        )
    )
    samples, sampling = lay_out_samples(plan, tables, shape, is_padded=shapes.is_padded)
    slot_edits = SlotEdits(slots=slot_of_row[edits.rows], cols=edits.cols, pages=edits.pages)
    return StepLayout(
        shape=replace(shape, prompt_logits=samples.kept.size - samples.rows.size),
        num_samples=num_samples,
        inputs=_lay_out_inputs(plan, tables, slot_of_row, shape, views, samples, is_padded=shapes.is_padded),
        extras=StepExtras(edits=slot_edits if edits.rows.size else None, sampling=sampling),
    )


def blank(shape: StepShape, tables: RowTables, slot_of_row: Int64Array, views: Sequence[View]) -> StepInputs[HostArray]:
    """Returns the inputs of a padded step in which every row and token is padding."""
    plan = Plan(generation=0, step=0, checksum=0)
    samples, _ = lay_out_samples(plan, tables, shape, is_padded=True)
    return _lay_out_inputs(plan, tables, slot_of_row, shape, views, samples, is_padded=True)


def _lay_out_inputs(
    plan: Plan,
    tables: RowTables,
    slot_of_row: Int64Array,
    shape: StepShape,
    views: Sequence[View],
    samples: Samples[HostArray],
    *,
    is_padded: bool,
) -> StepInputs[HostArray]:
    decode = prefill = None
    if shape.decode:
        decode = lay_out_decode(plan, tables, slot_of_row, shape.decode, views, is_padded=is_padded)
    if shape.prefill:
        num_tokens = shape.tokens - (decode.rows.size if decode else 0)
        prefill = lay_out_prefill(plan, tables, slot_of_row, shape.prefill, views, num_tokens)
    # Of packed tokens: first those of decode rows, then those of chunks.
    rows = [decode.rows] if decode else []
    positions = [tables.position[decode.rows] * (decode.rows > 0)] if decode else []
    ids = [_ids_of_decode_rows(decode.rows, tables)] if decode else []
    for row, start, count in zip(plan.chunk_rows, plan.chunk_starts, plan.chunk_counts, strict=True):
        rows.append(np.full(count, row, np.int64))
        positions.append(np.arange(start, start + count, dtype=np.int64))
        ids.append(tables.tokens[int(row)][start : start + count].astype(np.int64))
    if is_padded:
        padding = np.zeros(shape.tokens - sum(part.size for part in rows), np.int64)
        rows, positions, ids = [*rows, padding], [*positions, padding], [*ids, padding]
    all_rows, all_positions = np.concatenate(rows), np.concatenate(positions)
    return StepInputs(
        token_ids=np.concatenate(ids),
        positions=all_positions,
        # Padding is row 0 at position 0, which has the first slot of page 0.
        kv_slots=token_slots(tables, all_rows, all_positions),
        decode=decode,
        prefill=prefill,
        samples=samples,
    )


def _ids_of_decode_rows(rows: Int64Array, tables: RowTables) -> Int64Array:
    """Returns each row's last token if the host has it, -1 if the device sampled it, 0 for padding."""
    ids = np.where(rows > 0, -1, 0)
    for i in np.flatnonzero(tables.num_tokens[rows] == tables.num_started[rows]):
        ids[i] = tables.tokens[int(rows[i])][-1] if rows[i] else 0
    return ids
