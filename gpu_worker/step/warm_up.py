"""Plans that the runner executes before it serves, to compile every kernel and to measure memory and time."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gpu_worker.geometry import Geometry, align_up
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.started import EVERYTHING, GREEDY, StartedRows


def rehearsals(rehearse: Callable[..., object], geometry: Geometry) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields steps that need every kernel, by name: with changed logits, with rows that draw. rehearse: runs plans."""
    yield "prefill kernel", partial(rehearse, warm_up_plan(num_rows=1, chunk=True))
    yield "decode kernel", partial(rehearse, warm_up_plan(num_rows=geometry.max_rows, chunk=False))


def warm_up_plan(*, num_rows: int, chunk: bool) -> Plan:
    """Returns a plan of rows that share page 1, as chunks of one token or as decode rows; every second row draws."""
    rows, ones = np.arange(1, num_rows + 1, dtype=np.int32), np.ones(num_rows, np.int32)
    drawing = GREEDY.but(temperature=1, top_p=0.5, min_p=0.1)
    started = StartedRows.of_prompts(
        rows,
        [np.zeros(1, np.int32)] * num_rows,
        [ones[:1]] * num_rows,
        sampling=[drawing if row % 2 else GREEDY for row in rows.tolist()],
    )
    return _first_plan(started, ones if chunk else ones[:0])


def _first_plan(started: StartedRows, counts: NDArray[np.int32]) -> Plan:
    """Returns a plan in which the first of the started rows compute chunks of these lengths, and the others decode."""
    rows, num = started.rows, counts.size
    return Plan(
        generation=0,
        step=1,
        checksum=0,
        started=started,
        chunk_rows=rows[:num],
        chunk_starts=np.zeros(num, np.int32),
        chunk_counts=counts,
        chunk_samples=np.ones(num, np.bool_),
        decode_rows=rows[num:],
    )


def full_prompts_plan(geometry: Geometry) -> Plan:
    """Returns a plan of greedy prompts only, with as many tokens as budget and rows allow.

    Each row has its own pages as long as the pool has enough.
    """
    counts = _chunks(geometry, others_decode=False)
    num_pages = [align_up(count, geometry.page_size) // geometry.page_size for count in counts]
    pages = (1 + np.arange(sum(num_pages)) % (geometry.num_pages - 1)).astype(np.int32)
    started = StartedRows.of_prompts(
        np.arange(1, len(counts) + 1, dtype=np.int32),
        [np.zeros(count, np.int32) for count in counts],
        np.split(pages, np.cumsum(num_pages)[:-1]),
    )
    return _first_plan(started, counts)


def full_plan(geometry: Geometry) -> Plan:
    """Returns the largest plan, on page 1: each row uses every feature, and chunks fill the rest of the budget."""
    num_rows = geometry.max_rows
    counts = _chunks(geometry, others_decode=True)
    rows = np.arange(1, num_rows + 1, dtype=np.int32)
    ones, zeros = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
    lengths = ones.copy()
    lengths[: counts.size] = counts
    num_pages = -(-lengths // geometry.page_size)
    # The first row's prompt has as many logprobs as the limit on logits allows besides one sample per row.
    logprobs_from = zeros.copy()
    logprobs_from[0] = max(lengths[0] - (geometry.logit_rows - num_rows), 1) if lengths[0] > 1 else 0
    started = StartedRows.of_prompts(
        rows,
        [np.zeros(length, np.int32) for length in lengths],
        [np.ones(pages, np.int32) for pages in num_pages],
        sampling=[EVERYTHING] * num_rows,
        num_logprobs=ones + 1,
        prompt_logprobs_from=logprobs_from,
    )
    return _first_plan(started, counts)


def _chunks(geometry: Geometry, *, others_decode: bool) -> NDArray[np.int32]:
    """Returns the tokens of the first rows' chunks: a row's full length each, and the remaining budget for the last."""
    counts, used = list[int](), 0
    for row in range(geometry.max_rows):
        left = geometry.token_budget - used - (geometry.max_rows - row - 1 if others_decode else 0)
        left -= left % geometry.chunk_align
        if left <= 0:
            break
        counts.append(min(left, geometry.max_length))
        used += align_up(counts[-1], geometry.chunk_align)
    return np.array(counts, np.int32)
