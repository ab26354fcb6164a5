"""Makes one step's plan: who decodes, who gives way, which prompt chunks run. Whom to admit says `admit`.

Owns no state; it moves requests between the book's queue and the lane's rows. Running first, then waiting, until the
token budget is spent; prefill, chunked prefill, decode and resume are one mechanism, catching up with what is known.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.schedule.admit import admit, admit_alone, park_misfits
from scheduler_svc.core.schedule.finish_plan import commit
from scheduler_svc.core.schedule.logit_budget import LogitRoom
from scheduler_svc.core.schedule.plan_builder import Draft
from scheduler_svc.core.schedule.policy import chunk_tokens, queue_key, victim_key
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request_queue import RequestBook

_NOBODY = np.zeros(0, np.int64)


def plan_step(
    *,
    lane: Lane,
    book: RequestBook,
    suspects: Collection[int],
    rivals: Sequence[Lane],
    frontend_idx: Callable[[str], int],
    counters: Counters,
    policy: Policy,
    max_bytes: int,
    now: float,
) -> Plan | None:
    """The lane's next plan, or None where nothing can run. The lane already holds its in-flight record.

    `suspects` are handles of requests whose last step failed: when one's turn comes it runs alone and the others pause,
    until it has sampled. Where it does not fit yet, the others run on. `rivals` are the other lanes. Rows are started
    up to `max_bytes` of the encoded plan.
    """
    park_misfits(book, lane, rivals)
    draft = Draft(
        lane=lane,
        book=book,
        frontend_idx=frontend_idx,
        counters=counters,
        now=now,
        budget=lane.info.token_budget,
        bytes_left=max_bytes,
        room=_logit_room(lane, book),
    )
    while True:
        decode, is_starved = _decide(draft, suspects, rivals, policy)
        if draft.chunks or len(decode):
            lane.schedule.step_planned()
            plan = commit(draft, decode)
            lane.free_behind_windows()
            return plan
        # A preemption alone changes no table of the worker. Pages go to the best first and victims are the worst, so
        # whoever got a page still decodes.
        if not is_starved or lane.in_flight:
            for _, _, page_hash in draft.saves:
                lane.host.forget(page_hash)  # no plan carries it there
            return None
        # Prompts under way, all of them, wait for pages of one another.
        draft.preempt(max(lane.rows.requests_at(lane.rows.seated()), key=victim_key))
        draft.restart(lane.info.token_budget, _logit_room(lane, book))


def _decide(
    draft: Draft, suspects: Collection[int], rivals: Sequence[Lane], policy: Policy
) -> tuple[npt.NDArray[np.int64], bool]:
    """Who decodes in the step, and whether a prompt under way got no pages; the draft has the rest."""
    rows = draft.lane.rows
    seated = rows.seated()
    solo = _solo_row(draft, seated, suspects) if suspects else 0
    if solo:
        seated = np.array([solo], np.int64)
    remaining = np.minimum(rows.known[seated] + rows.samples[seated], rows.last[seated]) - rows.planned[seated]
    decoding = seated[remaining == 1]
    decode = _grow_decoding(draft, decoding) if policy.mixed_steps else _NOBODY
    if draft.has_preempted:
        mask = rows.handle[seated] != 0
        seated, remaining = seated[mask], remaining[mask]
    draft.decode(decode)
    is_starved = _continue_chunks(draft, seated[remaining > 1])
    if not draft.has_preempted and not solo:
        admit(draft, suspects, rivals, policy)
    if not policy.mixed_steps and not draft.chunks and not draft.fresh:
        decode = _grow_decoding(draft, decoding)
    if draft.fresh:
        decode = np.concatenate([decode, np.array(draft.fresh, np.int64)])
    return decode, is_starved


def _logit_room(lane: Lane, book: RequestBook) -> LogitRoom:
    """What a step has for prompt logprobs. No admission and no preemption of the step changes the sum of rows."""
    may_sample = min(lane.info.max_rows, lane.rows.num_seated + book.num_waiting)
    return LogitRoom(logit_rows=lane.info.logit_rows, rows_that_may_sample=may_sample)


def _solo_row(draft: Draft, seated: npt.NDArray[np.int64], suspects: Collection[int]) -> int:
    """The row of the suspect that runs alone now, seated if it is the queue's head; 0 where none can."""
    for row in seated.tolist():
        if draft.lane.rows.request_at(row).handle in suspects:
            return row
    head = draft.book.head()
    return admit_alone(draft, head) if head is not None and head.handle in suspects else 0


def _grow_decoding(draft: Draft, decode: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Gives each row that crosses a page edge its next page, preempting where the pool is empty; who still decodes."""
    rows = draft.lane.rows
    crossing = decode[rows.planned[decode] == rows.num_pages[decode] * draft.lane.info.page_size]
    if not len(crossing):
        return decode
    requests = sorted(rows.requests_at(crossing), key=queue_key)
    if draft.grow_by_one([request.row for request in requests]):
        return decode
    for request in requests:
        while request.row and not draft.grow(request.row, int(rows.planned[request.row]) + 1):
            draft.preempt(max(rows.requests_at(rows.seated()), key=victim_key))
    return decode[rows.handle[decode] != 0] if draft.has_preempted else decode


def _continue_chunks(draft: Draft, chunking: npt.NDArray[np.int64]) -> bool:
    """Chunks of prompts under way, best first; True where one got no pages."""
    lane, align = draft.lane, draft.lane.info.chunk_align
    for request in sorted(lane.rows.requests_at(chunking), key=queue_key):
        row, planned = request.row, int(lane.rows.planned[request.row])
        count = chunk_tokens(remaining=int(lane.rows.known[row]) - planned, budget=draft.budget, align=align)
        if count == 0:
            # A prompt under way that got nothing keeps newcomers out too: first come, first served.
            draft.admit_no_more()
            return False
        if request.prompt_logprobs_from:
            count = draft.room.cut(request, planned, count, align)
        if count and not draft.grow(row, planned + count):
            # With a window pages come chunk by chunk, and others may have taken them.
            room = (int(lane.rows.num_pages[row]) + lane.pool.num_unused) * lane.info.page_size - planned
            count = min(count, room // align * align)
            if count <= 0 or not draft.grow(row, planned + count):
                draft.admit_no_more()
                return True
        if count:  # else it waits for logits, which nobody else does
            draft.chunk(row, planned, count)
    return False
