"""Makes one step's plan for a lane: which rows decode, which are preempted, which prompt chunks run.

The planner moves requests between the queue and the lane's rows. Running rows come first, then waiting requests
(`admit`), until the token budget is spent. Prefill, chunked prefill, decode and resume are one mechanism: a row
computes the positions of its known tokens that are not computed yet.

**Rows of tenants.** Fair share decides which request starts next, but a tenant with long outputs could hold all rows
meanwhile. So if the next request finds no free row, or no pages, and a tenant has at least two rows more than the
request's tenant, that tenant's last request is preempted. It keeps its pages in the cache until they are allocated
again, so it usually computes less than a page again. A row changes hands only if the tenant that gives it still has as
many as the one that takes it, so the numbers of rows approach each other and then rest. Keeping rows free for tenants
that may come would cost throughput all the time.

**Chunks of tenants.** Running prompts go before waiting requests, but not those of a tenant that comes later in the
order.

**Probation.** A worker with wrong sizes or a broken device must not change the limits of the service. A new lane is
therefore on probation: the ordinary planner plans one token of a sequence that belongs to no caller, and the result is
checked like any other. When the step is confirmed, the lane gets requests, and callers may rely on its sizes.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array, index_of
from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.plan import NOTHING_MOVES, PageMoves, Plan, SentPlan, WantedPromptLogprobs
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.queue.turns import running_key
from scheduler_svc.core.schedule.admit import admit, admit_suspects, set_aside_misfits
from scheduler_svc.core.schedule.placement import Placement
from scheduler_svc.core.schedule.plan_builder import PlanBuilder, wanted_by_chunk
from scheduler_svc.core.schedule.policy import before_sampling, chunk_tokens
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane, free_behind_windows, holds
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.rows import Rows

_NO_ROWS, _NO_FLAGS = np.zeros(0, np.int64), np.zeros(0, np.bool_)
# Any number of positions that are a chunk.
_A_CHUNK = 2


def plan_step(builder: PlanBuilder) -> Plan | None:
    """Makes the lane's next plan, and its record in the lane. Returns None if nothing can run."""
    lane = builder.lane
    set_aside_misfits(builder)
    make_room(builder)
    while True:
        decode, is_starved = _decide(builder)
        if builder.chunks or len(decode):
            lane.schedule.step_planned()
            plan = finish_plan(builder, decode)
            free_behind_windows(lane)
            return plan
        # Preemptions alone do not change the worker's tables, so no plan is sent for them.
        if not is_starved or lane.in_flight:
            for _, _, page_hash in builder.swap_outs:
                lane.host.evict(page_hash)  # no plan copies the page there
            return None
        # Every row is in the middle of its prompt and waits for pages that another row holds. The last one in the order
        # is preempted, so the first one always keeps its pages and makes progress.
        builder.preempt(max(lane.rows.requests_at(lane.rows.seated()), key=running_key))
        builder.restart()


def _decide(builder: PlanBuilder) -> tuple[npt.NDArray[np.int64], bool]:
    """Decides what the plan contains. The builder has it, but for the rows that decode, which are returned.

    Also returns whether a row in the middle of its prompt got no pages.
    """
    rows, turn, mixed_steps = builder.lane.rows, builder.turn, builder.policy.mixed_steps
    seated = rows.seated()
    if turn.is_trial is not None:
        # The other rows of the lane pause.
        is_held = builder.queue.is_held
        kept = [row for row in seated.tolist() if is_held(rows.request_at(row)) is turn.is_trial]
        seated = np.array(kept, np.int64)
    at = index_of(seated, is_ascending=True)
    remaining = np.minimum(rows.known[at] + rows.tokens_in_flight[at], rows.last[at]) - rows.planned[at]
    if rows.num_awaiting:
        remaining = _without_sampling(rows, seated, remaining, builder.lane.info.chunk_align)
    decoding = seated[remaining == 1]
    decode = _grow_decoding(builder, decoding) if mixed_steps else _NO_ROWS
    if builder.has_preempted:
        mask = rows.handle[seated] != 0
        seated, remaining = seated[mask], remaining[mask]
    builder.budget -= len(decode)
    is_starved = False
    if len(decode) < len(seated):
        chunking = sorted(rows.requests_at(seated[remaining > 1]), key=running_key)
        before, behind = before_head(builder, chunking)
        is_starved = _continue_chunks(builder, before)
        if behind:
            if not builder.has_preempted and turn.admits and (head := builder.queue.head()) is not None:
                admit(builder, tenant=head.submit.tenant)
            is_starved |= _continue_chunks(builder, behind)
    if not builder.has_preempted and turn.is_trial:
        admit_suspects(builder)
    elif not builder.has_preempted and turn.admits:
        admit(builder)
    if not mixed_steps and not builder.chunks and not builder.fresh:
        decode = _grow_decoding(builder, decoding)
    if builder.fresh:
        decode = np.concatenate([decode, np.array(builder.fresh, np.int64)])
    return decode, is_starved


def _without_sampling(rows: Rows, seated: npt.NDArray[np.int64], remaining: Int32Array, align: int) -> Int32Array:
    """Returns `remaining`, where rows that must not sample have a chunk (`before_sampling`) or nothing left."""
    may_chunk = np.where(remaining > align, _A_CHUNK, 0).astype(np.int32)
    return np.where(rows.awaits_needs[seated], may_chunk, remaining)


def _grow_decoding(builder: PlanBuilder, decode: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Gives rows that cross a page edge their next page, preempts if none is left, and returns the rows that decode.

    Rows get pages from the front of the queue order and are preempted from its end, so a row that got a page in this
    plan is not preempted by it.
    """
    rows = builder.lane.rows
    crossing = decode[rows.planned[decode] == rows.num_pages[decode] * builder.lane.info.page_size]
    if not len(crossing):
        return decode
    requests = sorted(rows.requests_at(crossing), key=running_key)
    if builder.grow_by_one([request.row for request in requests]):
        return decode
    for request in requests:
        while request.row and not builder.grow(request.row, int(rows.planned[request.row]) + 1):
            builder.preempt(max(rows.requests_at(rows.seated()), key=running_key))
    return decode[rows.handle[decode] != 0] if builder.has_preempted else decode


def _continue_chunks(builder: PlanBuilder, chunking: Sequence[Request]) -> bool:
    """Plans the next chunk of each request that is in the middle of its prompt.

    Returns True if one of them got no pages.
    """
    lane, align = builder.lane, builder.lane.info.chunk_align
    for request in chunking:
        row, planned = request.row, int(lane.rows.planned[request.row])
        remaining = int(lane.rows.known[row]) - planned
        if lane.rows.num_awaiting and lane.rows.awaits_needs[row]:
            remaining = before_sampling(remaining, align)
        count = chunk_tokens(remaining=remaining, budget=builder.budget, align=align)
        if count == 0:
            # If a running row gets no chunk, no waiting request is admitted, so that it is not overtaken.
            builder.budget = 0
            return False
        if request.prompt_logprobs_from:
            count = builder.take_logit_rows(request, planned, count)
        if count and not builder.grow(row, planned + count):
            # With a window, pages are allocated chunk by chunk, and other rows may have taken them.
            room = (int(lane.rows.num_pages[row]) + lane.pool.num_unused) * lane.info.page_size - planned
            count = min(count, room // align * align)
            if count <= 0 or not builder.grow(row, planned + count):
                builder.budget = 0
                return True
        if count:  # if 0, it waits for logit rows, which other rows do not need
            builder.chunk(row, planned, count)
    return False


def make_room(builder: PlanBuilder) -> None:
    """Preempts one request if the next one has waited for a row or pages that its tenant has a better claim to."""
    queue, lane, turn = builder.queue, builder.lane, builder.turn
    if len(queue.tenants) < 2 or turn.is_trial is not None or not turn.admits or turn.closed is lane:
        return
    head = queue.head()
    if head is None or head.pending_plans or not holds(lane, head):
        return
    if lane.num_free_rows and lane.schedule.blocked != (head.handle, lane.pool.num_releases):
        return
    running = lane.rows.requests_at(lane.rows.seated())
    rows = Counter(request.submit.tenant for request in running)
    rich = [request for request in running if rows[request.submit.tenant] >= rows[head.submit.tenant] + 2]
    if rich:
        builder.preempt(max(rich, key=running_key))
        builder.has_preempted = False  # it was made for an admission


def before_head(builder: PlanBuilder, requests: list[Request]) -> tuple[list[Request], list[Request]]:
    """Divides running requests into those that go before the next waiting one and those that go behind it."""
    queue = builder.queue
    head = None if len(queue.tenants) < 2 or builder.turn.is_trial is not None else queue.head()
    if head is None:
        return requests, []
    at = next(turn for turn, _ in queue.tenants[head.submit.tenant].turns(1))
    before = [request for request in requests if request.submit.tenant == head.submit.tenant or request.turn <= at]
    return before, [request for request in requests if request not in before]


def finish_plan(builder: PlanBuilder, decode: npt.NDArray[np.int64]) -> Plan:
    """Makes the plan. Besides the builder's chunks, the rows `decode` int64[n] compute one position each."""
    lane, chunks = builder.lane, builder.chunks
    rows = lane.rows
    chunk_rows, chunk_starts, chunk_counts, chunk_samples = NO_IDS, NO_IDS, NO_IDS, _NO_FLAGS
    all_rows, counts = decode, rows.ones[: len(decode)]
    sampled = np.arange(len(chunks), len(chunks) + len(decode), dtype=np.int64)
    if chunks:
        # Most plans only decode and do without these arrays.
        chunk_rows, chunk_counts = np.array(chunks, np.int32).T.copy()
        chunk_starts = rows.planned[chunk_rows]
        chunk_samples = chunk_starts + chunk_counts == rows.known[chunk_rows]
        all_rows, counts = np.concatenate([chunk_rows, decode]), np.concatenate([chunk_counts, counts])
        sampled = np.concatenate([chunk_samples.nonzero()[0], sampled])
    at = index_of(all_rows, is_ascending=not chunks and not builder.fresh)
    ends = rows.plan(all_rows, at, counts, sampled)
    take_over = lane.pages.take_order()
    num_logprobs, wanted = None, ()
    if rows.num_with_logprobs:
        num_logprobs, wanted = _wanted_logprobs(rows, all_rows[sampled], chunks, chunk_starts)
    lane.plan_made(
        SentPlan(
            step=lane.step + 1,
            sent_at=builder.now,
            rows=all_rows,
            index=at,
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
            started_tokens=sum(len(start.tokens) for start in builder.starts),
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
        zero_pages=np.array(zero_pages, np.int32) if zero_pages else NO_IDS,
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
    return list(np.array(entries, np.int32).T.copy()) if entries else [NO_IDS] * width


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


def probation_plan(lane: Lane, *, max_bytes: int, now: float) -> Plan:
    """Makes a plan of one row and one token. Its request is removed at once, while the plan stays in flight.

    The handle is negative, so it does not belong to a live request and the token is dropped when the result arrives.
    """
    submit = Submit(
        frontend="",
        stream=0,
        request_id="probation",
        prompt=np.zeros(1, np.int32),
        sampling=b"",
        max_new_tokens=1,
        ignore_eos=True,
    )
    handle = -lane.number
    request = Request(
        handle=handle, submit=submit, frontend="", stream=0, total_length=2, expected_length=2, arrived_at=now
    )
    queue = RequestQueue()
    queue.add(request)
    builder = PlanBuilder(
        lane=lane,
        queue=queue,
        placement=Placement((lane,)),
        frontends={},
        counters=Counters(),
        policy=Policy(),
        now=now,
        bytes_left=max_bytes,
    )
    plan = plan_step(builder)
    assert plan is not None, "an empty lane has room for one token"
    lane.unseat(request, Move.END)
    return plan
