"""Lays a plan out as the arrays of its step: packed tokens and their token slots, page lists, rows that sample.

The module packs decode rows, then chunks, then padding, on the host with numpy. The host does not know the sampled
tokens, so the device fills in their ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from gpu_worker.layout.row_tables import Feature, RowTables
from gpu_worker.layout.samples import SampledRows, SampleExtras, Samples, lay_out_extras, write_samples
from gpu_worker.sampling.inputs import allocated_draw_inputs
from gpu_worker.wire.frames import Plan
from tandem_contract.plural import numbered

# A step appends a page to one of 128 decode rows or so. More entries are uploaded apart.
MAX_STATIC_EDITS = 32
# Each shape is captured as one graph, which takes memory and time.
MAX_SHAPES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes of a step's arrays; those of a padded step are at least the step's own."""

    # Decode rows; 0: no decode part.
    decode: int
    # Query positions of chunks; 0: no chunks.
    prefill: int
    # Packed tokens: those of decode rows, then those of chunks.
    tokens: int
    # Rows that sample.
    samples: int
    # Whether some sample may draw; the others are greedy.
    draws: bool
    # Prompt tokens with logits, besides the samples.
    prompt_logits: int = 0

    def __str__(self) -> str:
        chunks = f"{numbered(self.tokens - self.decode, 'prompt token')}, " if self.prefill else ""
        return f"step of {chunks}{numbered(self.decode, 'row')}{'' if self.draws else ', greedy'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(Generic[Array]):
    """What masks, model and sampling of a step read. The shape decides the size of every array."""

    # int64 [tokens]: ids (-1: the token that the device sampled last for the row), positions, token slots.
    token_ids: Array
    positions: Array
    kv_slots: Array
    decode: DecodePart[Array] | None
    prefill: PrefillPart[Array] | None
    samples: Samples[Array]
    # int64 [3, MAX_STATIC_EDITS]: entries of the page table, as `RowTables.apply` returns them. Padding sets the first
    # page of row 0 to 0, which it always is.
    edits: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtras(Generic[Array]):
    """What only some steps have: entries of the page table, and what changes or adds to sampling."""

    # None if the inputs contain them.
    edits: Array | None
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


def allocated(shape: StepShape, geometry: Geometry, views: Sequence[View], space: Space) -> StepInputs[HostArray]:
    """Returns the inputs of a step of this shape, with undefined numbers."""
    ids, positions, kv_slots = (space.int64(shape.tokens) for _ in range(3))
    num_chunk = shape.tokens - shape.decode
    return StepInputs(
        token_ids=ids,
        positions=positions,
        kv_slots=kv_slots,
        decode=allocated_decode(shape.decode, views, space) if shape.decode else None,
        prefill=allocated_prefill(shape.prefill, num_chunk, geometry.chunk_align, views, space)
        if shape.prefill
        else None,
        samples=Samples(
            kept=space.int64(shape.samples + shape.prompt_logits),
            rows=space.int64(shape.samples),
            drawing=allocated_draw_inputs(shape.samples, space) if shape.draws else None,
        ),
        edits=space.int64(3 * MAX_STATIC_EDITS).reshape(3, MAX_STATIC_EDITS),
    )


def lay_out(
    plan: Plan,
    edits: Int64Array,
    tables: RowTables,
    views: Sequence[View],
    inputs_of: Callable[[StepShape], tuple[StepShape, StepInputs[HostArray]]],
) -> StepLayout[HostArray]:
    """Returns the arrays of `plan`. `tables` have its starts and appends, and the positions before the step.

    edits: the result of `tables.apply`.
    inputs_of: returns the shape for a step of these sizes, and inputs of that shape, which are overwritten.
    """
    sampled = SampledRows.of(plan, tables)
    shape, inputs = inputs_of(_sizes_of(plan, tables.geometry, sampled))
    write_inputs(inputs, plan, tables, views, sampled)
    num_edits = edits.shape[1]
    is_static = 0 < num_edits <= MAX_STATIC_EDITS
    if is_static:
        inputs.edits[:, :num_edits] = edits
        inputs.edits[:, num_edits:] = 0
    return StepLayout(
        shape=shape,
        num_samples=sampled.rows.size,
        has_static_edits=is_static,
        inputs=inputs,
        extras=StepExtras(
            edits=edits if num_edits and not is_static else None,
            sampling=lay_out_extras(sampled, tables, inputs.samples),
        ),
    )


def _sizes_of(plan: Plan, geometry: Geometry, sampled: SampledRows) -> StepShape:
    num_decode, num_tokens, num_queries = plan.decode_rows.size, plan.decode_rows.size, 0
    if plan.chunk_rows.size:
        num_tokens += int(plan.chunk_counts.sum())
        tiles = -(-plan.chunk_counts.astype(np.int64) // geometry.chunk_align)
        num_queries = int(tiles.sum()) * geometry.chunk_align
    return StepShape(
        decode=num_decode,
        prefill=num_queries,
        tokens=num_tokens,
        samples=sampled.rows.size,
        draws=bool(sampled.any_use & Feature.DRAWS),
        prompt_logits=sampled.prompt_at.size,
    )


def write_inputs(
    inputs: StepInputs[HostArray], plan: Plan, tables: RowTables, views: Sequence[View], sampled: SampledRows
) -> None:
    """Writes all inputs but the entries of the page table."""
    # The packed tokens: first those of decode rows, then those of chunks, then padding.
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
