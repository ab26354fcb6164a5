"""Makes a step's decisions binding: the rows advance, the lane keeps its in-flight record, the plan is complete.

Owns no state and decides nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_PAGES, Int32Array
from scheduler_svc.core.messages.plan import NOTHING_MOVES, InFlight, PageMoves, Plan, PromptAsk
from scheduler_svc.core.schedule.logit_budget import ask_of
from scheduler_svc.core.schedule.plan_builder import Draft
from scheduler_svc.core.state.rows import Rows


def commit(draft: Draft, decode: npt.NDArray[np.int64]) -> Plan:
    """Advances the rows, leaves the in-flight record and makes the plan."""
    lane, chunks = draft.lane, draft.chunks
    rows = lane.rows
    chunk_rows = np.array([row for row, _ in chunks], np.int64)
    chunk_counts = np.array([count for _, count in chunks], np.int32)
    chunk_starts = rows.planned[chunk_rows]
    chunk_samples = chunk_starts + chunk_counts == rows.known[chunk_rows]
    all_rows = np.concatenate([chunk_rows, decode])
    sampled = np.concatenate([np.flatnonzero(chunk_samples), np.arange(len(chunks), len(all_rows), dtype=np.int64)])
    rows.plan(all_rows, np.concatenate([chunk_counts, np.ones(len(decode), np.int32)]), sampled)
    num_logprobs, prompt_asks = _asks(rows, all_rows[sampled], chunks, chunk_starts) if rows.num_telling else (None, ())

    lane.plan_made(
        InFlight(
            step=lane.step + 1,
            sent_at=draft.now,
            rows=all_rows.astype(np.int32),
            handles=rows.handle[all_rows],
            ends=rows.planned[all_rows],
            sampled=sampled,
            prefill_tokens=sum(count for _, count in chunks),
            decode_tokens=len(decode),
            num_logprobs=num_logprobs,
            prompt_asks=prompt_asks,
            kept=tuple(draft.kept),
            saved=tuple(page_hash for _, _, page_hash in draft.saves),
        )
    )
    append_rows, append_pages = _columns(draft.appends, 2)
    return Plan(
        generation=lane.generation,
        step=lane.step,
        checksum=rows.checksum,
        zero_pages=np.array(lane.take_zero_pages(), np.int32),
        starts=tuple(draft.starts),
        append_rows=append_rows,
        append_pages=append_pages,
        chunk_rows=chunk_rows.astype(np.int32),
        chunk_starts=chunk_starts,
        chunk_counts=chunk_counts,
        chunk_samples=chunk_samples.astype(np.uint8),
        decode_rows=decode.astype(np.int32),
        moves=_moves(draft),
    )


def _moves(draft: Draft) -> PageMoves:
    if not (draft.saves or draft.copies or draft.loads):
        return NOTHING_MOVES
    saved_pages, saved_slots = _columns([(page, slot) for page, slot, _ in draft.saves], 2)
    copied_from, copied_to, copied_tokens = _columns(draft.copies, 3)
    loaded_slots, loaded_pages = _columns(draft.loads, 2)
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


def _asks(
    rows: Rows, sampled_rows: npt.NDArray[np.int64], chunks: list[tuple[int, int]], chunk_starts: Int32Array
) -> tuple[Int32Array | None, tuple[PromptAsk, ...]]:
    """The logprobs that the step will bring: of each sampled row, and of prompts, chunk after chunk."""
    num_logprobs = rows.num_logprobs[sampled_rows]
    asks: list[PromptAsk] = []
    for (row, count), start in zip(chunks, chunk_starts.tolist(), strict=True):
        first = int(rows.prompt_logprobs_from[row])
        if first and (ask := ask_of(rows.request_at(row), first, start, start + count)) is not None:
            asks.append(ask)
    return num_logprobs if num_logprobs.any() else None, tuple(asks)
