"""Lays a plan out as the arrays of its step: packed tokens and their token slots, page lists, rows that sample.

The module packs decode rows, then chunks, then padding, on the host with numpy. The host does not know the sampled
tokens, so the device fills in their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from gpu_worker.arrays import Array, HostArray, Int64Array, Space
from gpu_worker.attention.views import View
from gpu_worker.geometry import Geometry
from gpu_worker.layout.attention_parts import (
    DecodePart,
    DecodeSlots,
    PrefillPart,
    lay_out_decode,
    lay_out_prefill,
    token_slots,
)
from gpu_worker.layout.row_features import Feature
from gpu_worker.layout.row_tables import RowTables, SlotEdits, TableEdits
from gpu_worker.layout.samples import SampledRows, SampleExtras, Samples, lay_out_samples
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
    space: Space | None = None,
) -> StepLayout[HostArray]:
    """Returns the arrays of `plan`; those of its inputs are taken from `space`.

    `tables` have its starts and appends, and the positions before the step.
    """
    space = space or Space()
    sampled = SampledRows.of(plan, tables)
    shape = _shape_of(plan, shapes, tables.geometry, sampled)
    samples, sampling = lay_out_samples(plan, sampled, tables, shape, space, is_padded=shapes.is_padded)
    inputs = _lay_out_inputs(plan, tables, slot_of_row, shape, views, samples, space, is_padded=shapes.is_padded)
    prompt_logits = samples.kept.size - samples.rows.size
    slot_edits = None
    if edits.rows.size:
        slot_edits = SlotEdits(slots=slot_of_row[edits.rows], cols=edits.cols, pages=edits.pages)
    return StepLayout(
        shape=replace(shape, prompt_logits=prompt_logits) if prompt_logits else shape,
        num_samples=sampled.rows.size,
        inputs=inputs,
        extras=StepExtras(edits=slot_edits, sampling=sampling),
    )


def _shape_of(plan: Plan, shapes: Shapes, geometry: Geometry, sampled: SampledRows) -> StepShape:
    num_decode, num_tokens, num_queries = plan.decode_rows.size, plan.decode_rows.size, 0
    if plan.chunk_rows.size:
        num_tokens += int(plan.chunk_counts.sum())
        tiles = -(-plan.chunk_counts.astype(np.int64) // geometry.chunk_align)
        num_queries = int(tiles.sum()) * geometry.chunk_align
    return shapes.fitting(
        StepShape(
            decode=num_decode,
            prefill=num_queries,
            tokens=num_tokens,
            samples=sampled.rows.size,
            draws=shapes.is_padded and sampled.any_uses(Feature.DRAWS),
        )
    )


def blank(
    shape: StepShape, tables: RowTables, slot_of_row: Int64Array, views: Sequence[View], space: Space | None = None
) -> StepInputs[HostArray]:
    """Returns the inputs of a padded step in which every row and token is padding."""
    plan, space = Plan(generation=0, step=0, checksum=0), space or Space()
    samples, _ = lay_out_samples(plan, SampledRows.of(plan, tables), tables, shape, space, is_padded=True)
    return _lay_out_inputs(plan, tables, slot_of_row, shape, views, samples, space, is_padded=True)


def _lay_out_inputs(
    plan: Plan,
    tables: RowTables,
    slot_of_row: Int64Array,
    shape: StepShape,
    views: Sequence[View],
    samples: Samples[HostArray],
    space: Space,
    *,
    is_padded: bool,
) -> StepInputs[HostArray]:
    # Of packed tokens: first those of decode rows, then those of chunks, then padding.
    ids, positions, kv_slots = space.int64(shape.tokens), space.int64(shape.tokens), space.int64(shape.tokens)
    decode = prefill = None
    begin = 0
    if shape.decode:
        slots = DecodeSlots.of(plan, slot_of_row, shape.decode, space, is_padded=is_padded)
        begin = slots.rows.size
        positions[:begin] = tables.position[slots.rows]
        token_slots(tables, slots.rows, positions[:begin], into=kv_slots[:begin])
        _write_ids_of_decode_rows(plan, tables, positions, ids[:begin])
        decode = lay_out_decode(slots, positions[:begin], kv_slots[:begin], tables, views, space)
    if shape.prefill:
        prefill = lay_out_prefill(plan, tables, slot_of_row, shape.prefill, views, shape.tokens - begin, space)
    if shape.tokens > begin:
        _write_chunk_tokens(plan, tables, ids[begin:], positions[begin:], kv_slots[begin:])
    return StepInputs(
        token_ids=ids, positions=positions, kv_slots=kv_slots, decode=decode, prefill=prefill, samples=samples
    )


def _write_chunk_tokens(
    plan: Plan, tables: RowTables, ids: Int64Array, positions: Int64Array, kv_slots: Int64Array
) -> None:
    """Writes the tokens of chunks and, in a padded step, the padding after them."""
    counts = plan.chunk_counts.astype(np.int64)
    ends = np.cumsum(counts)
    num = int(counts.sum())
    positions[:num] = np.arange(num) + np.repeat(plan.chunk_starts - (ends - counts), counts)
    token_slots(tables, np.repeat(plan.chunk_rows.astype(np.int64), counts), positions[:num], into=kv_slots[:num])
    for row, start, count, end in zip(
        plan.chunk_rows.tolist(), plan.chunk_starts.tolist(), counts.tolist(), ends.tolist(), strict=True
    ):
        ids[end - count : end] = tables.tokens[row][start : start + count]
    # Padding is at position 0 of row 0, which has the first slot of page 0.
    ids[num:] = positions[num:] = kv_slots[num:] = 0


def _write_ids_of_decode_rows(plan: Plan, tables: RowTables, positions: Int64Array, ids: Int64Array) -> None:
    """Writes each row's last token if the host has it, -1 if the device sampled it, 0 for padding."""
    num = plan.decode_rows.size
    ids[:num] = -1
    ids[num:] = 0
    has_sampled = positions[:num] >= tables.num_started[plan.decode_rows]
    if np.count_nonzero(has_sampled) < num:
        for i in np.flatnonzero(~has_sampled).tolist():
            ids[i] = tables.tokens[int(plan.decode_rows[i])][-1]
