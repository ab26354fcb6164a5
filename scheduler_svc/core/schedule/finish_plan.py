"""Makes a plan from the decisions of a plan builder. The rows advance, and the lane keeps the record of the plan."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_IDS, NO_PAGES, Int32Array
from scheduler_svc.core.messages.plan import NOTHING_MOVES, PageMoves, Plan, SentPlan, WantedPromptLogprobs
from scheduler_svc.core.schedule.plan_builder import PlanBuilder, wanted_by_chunk
from scheduler_svc.core.state.rows import Rows

_NO_FLAGS = np.zeros(0, np.bool_)


def finish_plan(builder: PlanBuilder, decode: npt.NDArray[np.int64]) -> Plan:
    """Returns the plan. Besides the builder's chunks, the rows `decode` int64[n] compute one position each."""
    lane, chunks = builder.lane, builder.chunks
    rows = lane.rows
    chunk_rows = chunk_starts = chunk_counts = NO_IDS
    chunk_samples = _NO_FLAGS
    all_rows, counts = decode, rows.ones[: len(decode)]
    sampled = np.arange(len(chunks), len(chunks) + len(decode), dtype=np.int64)
    if chunks:
        # Most plans only decode and do without these arrays.
        chunk_rows, chunk_counts = np.array(chunks, np.int32).T.copy()
        chunk_starts = rows.planned[chunk_rows]
        chunk_samples = chunk_starts + chunk_counts == rows.known[chunk_rows]
        all_rows, counts = np.concatenate([chunk_rows, decode]), np.concatenate([chunk_counts, counts])
        sampled = np.concatenate([chunk_samples.nonzero()[0], sampled])
    ends = rows.plan(all_rows, counts, sampled)
    take_over = lane.pages.told()
    num_logprobs, wanted = None, ()
    if rows.num_with_logprobs:
        num_logprobs, wanted = _wanted_logprobs(rows, all_rows[sampled], chunks, chunk_starts)

    lane.plan_made(
        SentPlan(
            step=lane.step + 1,
            sent_at=builder.now,
            rows=all_rows,
            handles=rows.handle[all_rows],
            ends=ends,
            sampled=sampled,
            prefill_tokens=builder.prefill_tokens,
            decode_tokens=len(decode),
            num_logprobs=num_logprobs,
            wanted_prompt_logprobs=wanted,
            cached=tuple(builder.cached),
            swapped_out=tuple(page_hash for _, _, page_hash in builder.swap_outs),
            moved_pages=len(builder.swap_outs) + len(builder.copies) + len(builder.swap_ins),
            started_tokens=builder.started_tokens,
            constrained=rows.is_constrained[all_rows[sampled]] if rows.num_constrained else None,
            takes_over=b"" if take_over is None else take_over.pool_id,
        )
    )
    append_rows, append_pages = _columns(builder.appends, 2)
    zero_pages = lane.pages.take_zero_pages()
    return Plan(
        generation=lane.generation,
        step=lane.step,
        checksum=rows.checksum,
        zero_pages=np.array(zero_pages, np.int32) if zero_pages else NO_PAGES,
        starts=tuple(builder.starts),
        append_rows=append_rows,
        append_pages=append_pages,
        chunk_rows=chunk_rows,
        chunk_starts=chunk_starts,
        chunk_counts=chunk_counts,
        chunk_samples=chunk_samples.view(np.uint8),
        decode_rows=decode.astype(np.int32),
        moves=_moves(builder),
        take_over=take_over,
        labels=lane.pages.labels.take(lane.pool, lane.in_flight) if lane.pages.labels.is_on else None,
    )


def _moves(builder: PlanBuilder) -> PageMoves:
    if not (builder.swap_outs or builder.copies or builder.swap_ins):
        return NOTHING_MOVES
    saved_pages, saved_slots = _columns([(page, slot) for page, slot, _ in builder.swap_outs], 2)
    copied_from, copied_to, copied_tokens = _columns(builder.copies, 3)
    loaded_slots, loaded_pages = _columns(builder.swap_ins, 2)
    return PageMoves(
        saved_pages=saved_pages,
        saved_slots=saved_slots,
        copied_from=copied_from,
        copied_to=copied_to,
        copied_tokens=copied_tokens,
        loaded_slots=loaded_slots,
        loaded_pages=loaded_pages,
    )


def _columns(entries: Sequence[tuple[int, ...]], width: int) -> list[Int32Array]:
    return list(np.array(entries, np.int32).T.copy()) if entries else [NO_PAGES] * width


def _wanted_logprobs(
    rows: Rows, sampled_rows: npt.NDArray[np.int64], chunks: list[tuple[int, int]], chunk_starts: Int32Array
) -> tuple[Int32Array | None, tuple[WantedPromptLogprobs, ...]]:
    """Returns `num_logprobs` int32[sampled] (None if all are 0), and the wanted prompt logprobs of each chunk."""
    num_logprobs = rows.num_logprobs[sampled_rows]
    pieces: list[WantedPromptLogprobs] = []
    for (row, count), start in zip(chunks, chunk_starts.tolist(), strict=True):
        first = int(rows.prompt_logprobs_from[row])
        if first and (ask := wanted_by_chunk(rows.request_at(row), first, start, start + count)) is not None:
            pieces.append(ask)
    return num_logprobs if num_logprobs.any() else None, tuple(pieces)
