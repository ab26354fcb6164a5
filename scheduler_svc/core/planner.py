"""Makes one step's plan: who decodes, who gives way, which prompt chunks run, who is admitted.

Owns no state; it moves requests between the book's queue and the lane's rows. Running first, then waiting, until the
token budget is spent; prefill, chunked prefill, decode and resume are one mechanism, catching up with what is known.
"""

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.commit import commit
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.logprobs import LogitRoom
from scheduler_svc.core.plan import Plan, RowStart
from scheduler_svc.core.policy import chunk_tokens, queue_key, victim_key
from scheduler_svc.core.request import Move, Request


def plan_step(
    *,
    lane: Lane,
    book: RequestBook,
    suspects: Collection[int],
    frontend_idx: Callable[[str], int],
    now: float,
) -> Plan | None:
    """The lane's next plan, or None where nothing can run. The lane already holds its in-flight record.

    `suspects` are handles of requests whose last step failed: when one's turn comes it runs alone and the others pause,
    until it has sampled. Where it does not fit yet, the others run on.
    """
    rows = lane.rows
    seated = rows.seated()
    starts: list[RowStart] = []
    solo = _solo_row(lane, book, suspects, frontend_idx, starts, now) if suspects else 0
    if solo:
        seated = np.array([solo], np.int64)
    remaining = np.minimum(rows.known[seated] + rows.samples[seated], rows.last[seated]) - rows.planned[seated]
    decode = seated[remaining == 1]
    appends, preempted = _append_pages(lane, book, decode)
    if preempted:
        decode = decode[rows.handle[decode] != 0]
        mask = rows.handle[seated] != 0
        seated, remaining = seated[mask], remaining[mask]

    budget, room = lane.info.token_budget - len(decode), _logit_room(lane, book)
    chunks, budget = _continue_chunks(lane, seated[remaining > 1], budget, room)
    if not preempted and not solo:
        fresh = _admit(lane, book, suspects, frontend_idx, budget, room, starts, chunks, now)
        if fresh:
            decode = np.concatenate([decode, np.array(fresh, np.int64)])
    if not chunks and not len(decode):
        # A preemption alone changes no table of the worker. Pages go to the best first and victims are the worst, so
        # whoever got a page still decodes.
        assert not appends
        return None
    return commit(lane, starts, appends, chunks, decode, now)


def _logit_room(lane: Lane, book: RequestBook) -> LogitRoom:
    """What a step has for prompt logprobs. No admission and no preemption of the step changes the sum of rows."""
    may_sample = min(lane.info.max_rows, lane.rows.num_seated + book.num_waiting)
    return LogitRoom(logit_rows=lane.info.logit_rows, rows_that_may_sample=may_sample)


def _solo_row(
    lane: Lane,
    book: RequestBook,
    suspects: Collection[int],
    frontend_idx: Callable[[str], int],
    starts: list[RowStart],
    now: float,
) -> int:
    """The row of the suspect that runs alone now, seated if it is the queue's head; 0 where none can."""
    for row in map(int, lane.rows.seated()):
        if lane.rows.request_at(row).handle in suspects:
            return row
    head = book.head()
    if head is None or head.handle not in suspects:
        return 0
    # Its chunk is cut when its turn comes; this room is only looked at.
    admitted = _admit_head(lane, book, head, frontend_idx, lane.info.token_budget, _logit_room(lane, book), now)
    if admitted is None:
        return 0
    starts.append(admitted[0])
    return admitted[0].row


def _append_pages(lane: Lane, book: RequestBook, decode: npt.NDArray[np.int64]) -> tuple[list[tuple[int, int]], bool]:
    """Gives each decode row that crosses a page edge its next page, preempting where the pool is empty."""
    rows, pool = lane.rows, lane.pool
    crossing = decode[rows.planned[decode] == rows.num_pages[decode] * lane.info.page_size]
    requests = sorted(rows.requests_at(crossing), key=queue_key)
    appends: list[tuple[int, int]] = []
    preempted = False
    for request in requests:
        if not request.row:
            continue  # it gave way to one before it
        while (pages := pool.allocate(1)) is None:
            victim = max(rows.requests_at(rows.seated()), key=victim_key)
            preempted = True
            lane.preempt(victim)
            book.enqueue(victim)
            if victim is request:
                break
        if pages:
            rows.append_page(request.row, pages[0])
            appends.append((request.row, pages[0]))
    return appends, preempted


def _continue_chunks(
    lane: Lane, chunking: npt.NDArray[np.int64], budget: int, room: LogitRoom
) -> tuple[list[tuple[int, int]], int]:
    """Chunks (row, count) of prompts under way, best first; returns them and the budget left."""
    align = lane.info.chunk_align
    requests = sorted(lane.rows.requests_at(chunking), key=queue_key)
    chunks: list[tuple[int, int]] = []
    for request in requests:
        row, planned = request.row, int(lane.rows.planned[request.row])
        count = chunk_tokens(remaining=int(lane.rows.known[row]) - planned, budget=budget, align=align)
        if count == 0:
            # A prompt under way that got nothing keeps newcomers out too: first come, first served.
            return chunks, 0
        if request.prompt_logprobs_from:
            count = room.cut(request, planned, count, align)
        if count:  # else it waits for logits, which nobody else does
            chunks.append((row, count))
            budget -= -(-count // align) * align
    return chunks, budget


def _admit(
    lane: Lane,
    book: RequestBook,
    suspects: Collection[int],
    frontend_idx: Callable[[str], int],
    budget: int,
    room: LogitRoom,
    starts: list[RowStart],
    chunks: list[tuple[int, int]],
    now: float,
) -> list[int]:
    """Admits from the head of the queue while anything fits; returns rows whose one known token decodes at once."""
    fresh: list[int] = []
    plain = False
    while (request := book.head(plain=plain)) is not None and request.handle not in suspects:
        if request.prompt_logprobs_from and not room.has(lane.info.chunk_align):
            plain = True  # it waits for logits, which nobody else does
            continue
        admitted = _admit_head(lane, book, request, frontend_idx, budget, room, now)
        if admitted is None:
            break
        start, count, cost = admitted
        starts.append(start)
        budget -= cost
        if request.known == 1:
            fresh.append(start.row)
        else:
            chunks.append((start.row, count))
    return fresh


def _admit_head(
    lane: Lane,
    book: RequestBook,
    request: Request,
    frontend_idx: Callable[[str], int],
    budget: int,
    room: LogitRoom,
    now: float,
) -> tuple[RowStart, int, int] | None:
    """Seats the queue's head if a row, pages for all it knows and budget are there: its start, tokens, cost.

    Whole sequences only: admission by the first chunk alone thrashes, prompts throwing each other out half-way.
    """
    rows, align, known = lane.rows, lane.info.chunk_align, request.known
    count = 1 if known == 1 else chunk_tokens(remaining=known, budget=budget, align=align)
    if not rows.num_free or request.late_plans or count == 0 or count > budget:
        return None
    pages = lane.pool.allocate(lane.pages_for(known))
    if pages is None:
        return None
    if request.prompt_logprobs_from:
        count = room.cut(request, 0, count, align)
    cost = 1 if known == 1 else -(-count // align) * align
    book.take(request)
    request.move(Move.ADMIT)
    row = rows.seat(request, pages, frontend_idx(request.frontend))
    if request.admitted_at is None:
        request.admitted_at = now
    return _start(request, row, pages), count, cost


def _start(request: Request, row: int, pages: list[int]) -> RowStart:
    return RowStart(
        row=row,
        tokens=request.known_tokens(),
        pages=np.array(pages, np.int32),
        first_position=0,
        num_prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        sample_idx=request.sample_idx,
        banned_until=request.prompt_tokens + request.min_new_tokens,
        banned=request.banned,
        prompt_logprobs_from=request.prompt_logprobs_from,
    )
