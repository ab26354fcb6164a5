"""Lays a plan out as the arrays of its step: packed tokens and their token slots, page lists, rows that sample.

The module packs decode rows, then chunks, then padding, on the host with numpy. The host does not know the sampled
tokens, so the device fills in their ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from gpu_worker.arrays import Array, HostArray, Int64Array, Space
from gpu_worker.attention.views import View
from gpu_worker.geometry import Geometry
from gpu_worker.layout.attention_parts import (
    DecodePart,
    PrefillPart,
    allocated_decode,
    allocated_prefill,
    token_slots,
    write_decode,
    write_prefill,
)
from gpu_worker.layout.row_tables import Feature, RowTables, SlotEdits, TableEdits
from gpu_worker.layout.samples import SampledRows, SampleExtras, Samples, lay_out_extras, write_samples
from gpu_worker.layout.shapes import Shapes, StepShape
from gpu_worker.sampling.inputs import allocated_draw_inputs
from gpu_worker.wire.frames import Plan

# A step appends a page to one of 128 decode rows or so. More entries are uploaded apart.
MAX_STATIC_EDITS = 32


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
    # In padded steps: MAX_STATIC_EDITS entries of the page table. Padding sets the first page of row 0 to 0, which it
    # always is.
    edits: SlotEdits[Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtras(Generic[Array]):
    """What only some steps have: entries of the page table, and what changes or adds to sampling."""

    # None if the inputs contain them.
    edits: SlotEdits[Array] | None
    sampling: SampleExtras[Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout(Generic[Array]):
    """The arrays of one step."""

    shape: StepShape
    # Samples without padding.
    num_samples: int
    # Whether `inputs.edits` are set; otherwise they are undefined.
    has_static_edits: bool
    inputs: StepInputs[Array]
    extras: StepExtras[Array]


def allocated(
    shape: StepShape, geometry: Geometry, views: Sequence[View], space: Space, *, num_decode: int | None = None
) -> StepInputs[HostArray]:
    """Returns the inputs of a step of this shape, with undefined numbers.

    num_decode: the decode rows, if the step is not padded.
    """
    is_padded = num_decode is None
    decode = prefill = None
    ids, positions, kv_slots = (space.int64(shape.tokens) for _ in range(3))
    num_rows = shape.decode if num_decode is None else num_decode
    if shape.decode:
        decode = allocated_decode(shape.decode, num_rows, views, space, is_padded=is_padded)
    if shape.prefill:
        prefill = allocated_prefill(shape.prefill, shape.tokens - num_rows, geometry.chunk_align, views, space)
    entries = space.int64(3 * MAX_STATIC_EDITS).reshape(3, MAX_STATIC_EDITS) if is_padded else None
    return StepInputs(
        token_ids=ids,
        positions=positions,
        kv_slots=kv_slots,
        decode=decode,
        prefill=prefill,
        samples=Samples(
            kept=space.int64(shape.samples + shape.prompt_logits),
            rows=space.int64(shape.samples),
            drawing=allocated_draw_inputs(shape.samples, space) if is_padded and shape.draws else None,
        ),
        edits=None if entries is None else SlotEdits(entries=entries),
    )


def lay_out(
    plan: Plan,
    edits: TableEdits,
    tables: RowTables,
    shapes: Shapes,
    views: Sequence[View],
    place: Callable[[StepShape], StepInputs[HostArray] | None] = lambda _: None,
) -> StepLayout[HostArray]:
    """Returns the arrays of `plan`. `tables` have its starts and appends, and the positions before the step.

    place: returns the inputs that are overwritten, as `allocated` makes them; None: new ones.
    """
    sampled = SampledRows.of(plan, tables)
    shape = _shape_of(plan, shapes, tables.geometry, sampled)
    num_decode = shape.decode if shapes.is_padded else plan.decode_rows.size
    inputs = place(shape)
    if inputs is None:
        inputs = allocated(shape, tables.geometry, views, Space(), num_decode=None if shapes.is_padded else num_decode)
    _write_inputs(inputs, plan, tables, views, sampled)
    num_edits = edits.rows.size
    is_static = 0 < num_edits <= MAX_STATIC_EDITS and inputs.edits is not None
    if is_static:
        assert inputs.edits is not None
        inputs.edits.write(edits)
    return StepLayout(
        shape=shape,
        num_samples=sampled.rows.size,
        has_static_edits=is_static,
        inputs=inputs,
        extras=StepExtras(
            edits=SlotEdits.of(edits) if num_edits and not is_static else None,
            sampling=lay_out_extras(sampled, tables, is_padded=shapes.is_padded),
        ),
    )


def _shape_of(plan: Plan, shapes: Shapes, geometry: Geometry, sampled: SampledRows) -> StepShape:
    num_decode, num_tokens, num_queries = plan.decode_rows.size, plan.decode_rows.size, 0
    if plan.chunk_rows.size:
        num_tokens += int(plan.chunk_counts.sum())
        tiles = -(-plan.chunk_counts.astype(np.int64) // geometry.chunk_align)
        num_queries = int(tiles.sum()) * geometry.chunk_align
    shape = shapes.fitting(
        StepShape(
            decode=num_decode,
            prefill=num_queries,
            tokens=num_tokens,
            samples=sampled.rows.size,
            draws=shapes.is_padded and sampled.any_uses(Feature.DRAWS),
        )
    )
    return replace(shape, prompt_logits=sampled.prompt_at.size) if sampled.prompt_at.size else shape


def blank(inputs: StepInputs[HostArray], tables: RowTables, views: Sequence[View]) -> None:
    """Writes the inputs of a padded step in which every row and token is padding. `tables` have no rows."""
    plan = Plan(generation=0, step=0, checksum=0)
    _write_inputs(inputs, plan, tables, views, SampledRows.of(plan, tables))


def _write_inputs(
    inputs: StepInputs[HostArray],
    plan: Plan,
    tables: RowTables,
    views: Sequence[View],
    sampled: SampledRows,
) -> None:
    # Of packed tokens: first those of decode rows, then those of chunks, then padding.
    begin = 0
    ids, positions, kv_slots = inputs.token_ids, inputs.positions, inputs.kv_slots
    if inputs.decode is not None:
        begin = inputs.decode.rows.size
        write_decode(inputs.decode, positions[:begin], kv_slots[:begin], plan, tables, views)
        _write_ids_of_decode_rows(plan, tables, positions, ids[:begin])
    if inputs.prefill is not None:
        write_prefill(inputs.prefill, plan, tables, views)
    if ids.size > begin:
        _write_chunk_tokens(plan, tables, ids[begin:], positions[begin:], kv_slots[begin:])
    write_samples(inputs.samples, plan, sampled, tables, begin)


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
