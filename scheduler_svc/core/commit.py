"""Makes a step's decisions binding: the rows advance, the lane keeps its in-flight record, the plan is complete.

Owns no state and decides nothing.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.events import Int32Array
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.logprobs import ask_of
from scheduler_svc.core.plan import InFlight, Plan, PromptAsk, RowStart
from scheduler_svc.core.rows import Rows

_EMPTY = np.zeros(0, np.int32)


def commit(
    lane: Lane,
    starts: list[RowStart],
    appends: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    decode: npt.NDArray[np.int64],
    now: float,
) -> Plan:
    """Advances the rows, leaves the in-flight record and makes the plan."""
    rows = lane.rows
    chunk_rows = np.array([row for row, _ in chunks], np.int64)
    chunk_counts = np.array([count for _, count in chunks], np.int32)
    chunk_starts = rows.planned[chunk_rows]
    chunk_samples = chunk_starts + chunk_counts == rows.known[chunk_rows]
    all_rows = np.concatenate([chunk_rows, decode])
    sampled = np.concatenate([np.flatnonzero(chunk_samples), np.arange(len(chunks), len(all_rows), dtype=np.int64)])
    rows.advance(all_rows, np.concatenate([chunk_counts, np.ones(len(decode), np.int32)]))
    rows.samples[all_rows[sampled]] += 1
    num_logprobs, prompt_asks = _asks(rows, all_rows[sampled], chunks, chunk_starts) if rows.num_telling else (None, ())

    zero_pages, lane.zero_pages = np.array(lane.zero_pages, np.int32), []
    lane.step += 1
    lane.in_flight.append(
        InFlight(
            step=lane.step,
            sent_at=now,
            rows=all_rows.astype(np.int32),
            handles=rows.handle[all_rows],
            ends=rows.planned[all_rows],
            sampled=sampled,
            zero_pages=zero_pages,
            prefill_tokens=sum(count for _, count in chunks),
            decode_tokens=len(decode),
            num_logprobs=num_logprobs,
            prompt_asks=prompt_asks,
        )
    )
    return Plan(
        generation=lane.generation,
        step=lane.step,
        checksum=rows.checksum,
        zero_pages=zero_pages,
        starts=tuple(starts),
        append_rows=np.array([row for row, _ in appends], np.int32) if appends else _EMPTY,
        append_pages=np.array([page for _, page in appends], np.int32) if appends else _EMPTY,
        chunk_rows=chunk_rows.astype(np.int32),
        chunk_starts=chunk_starts,
        chunk_counts=chunk_counts,
        chunk_samples=chunk_samples.astype(np.uint8),
        decode_rows=decode.astype(np.int32),
    )


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
