"""`audit` checks the invariants of the core after an event. It is slow; tests and replay call it.

It changes nothing. A broken invariant raises an AssertionError that names it.
"""

from collections import Counter
from functools import cache

import numpy as np

from scheduler_svc.core.pages.lane_pages import audit_lane_pages
from scheduler_svc.core.queue.request_queue import audit_tenants
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.lane_phase import LanePhase, LanePhases
from scheduler_svc.core.state.request import Phase, Request
from scheduler_svc.core.state.rows import Rows
from tandem_contract.row_checksum import mix


def audit(core: Scheduler) -> None:
    """Checks all invariants; raises an AssertionError at the first one that is broken."""
    _audit_queue(core)
    for organ in core.organs:
        organ.audit()
    in_flight = {worker: _InFlightCounts(core, lane) for worker, lane in core.lanes.items()}
    for worker, lane in core.lanes.items():
        assert lane.worker == worker
        _audit_phases(lane)
        _audit_pages(lane)
        _audit_rows(core, lane, in_flight[worker])
        _audit_prompt_logprobs(core, lane)
    for held in core.held_pools.pools:
        assert not held.pages.num_used, "a row holds a page of a lost worker"
        assert all(held.pages is not lane.pool for lane in core.lanes.values()), "a pool is held and in use"
    audit_lane_pages([lane.pages for lane in core.lanes.values()])
    for request in core.queue:
        if not request.row:
            plans = sum(records.plans.get(request.handle, 0) for records in in_flight.values())
            samples = sum(records.samples.get(request.handle, 0) for records in in_flight.values())
            assert (request.pending_plans, request.pending_tokens) == (plans, samples), (
                f"{request.submit.request_id}: plans and tokens in flight are counted as "
                f"{(request.pending_plans, request.pending_tokens)}, but the sent plans have {(plans, samples)}"
            )


class _InFlightCounts:
    """For each request, how many of a lane's plans in flight contain it, and how many sample a token for it."""

    def __init__(self, core: Scheduler, lane: Lane) -> None:
        assert len(lane.in_flight) <= core.config.plans_in_flight, "more plans in flight than allowed"
        self.plans: Counter[int] = Counter()
        self.samples: Counter[int] = Counter()
        for record in lane.in_flight:
            handles = record.handles.tolist()
            self.plans.update(handles)
            self.samples.update(handles[i] for i in record.sampled.tolist())
            num_wanted = sum(wanted.count for wanted in record.wanted_prompt_logprobs)
            assert len(record.sampled) + num_wanted <= lane.info.logit_rows, (
                "a plan wants more logit rows than the worker has"
            )


def _audit_queue(core: Scheduler) -> None:
    queue = core.queue
    waiting = [request for request in queue if request.phase is Phase.WAITING]
    assert queue.num_waiting == len(waiting), (
        f"the queue counts {queue.num_waiting} waiting requests, but {len(waiting)} wait"
    )
    assert queue.waiting_tokens == sum(request.known for request in waiting), "waiting tokens are miscounted"
    assert sorted(r.handle for r in queue.waiting()) == sorted(r.handle for r in waiting), "the queue lost a request"
    for request in queue:
        assert request.phase is not Phase.ENDED, f"{request.submit.request_id} ended and is still live"
        assert (request.row > 0) == (request.phase is Phase.RUNNING), (
            f"{request.submit.request_id}: phase and row differ"
        )
        assert (request.worker in core.lanes) == (request.row > 0), f"{request.submit.request_id}: row and lane differ"
        assert request.num_outputs == sum(len(part) for part in request.outputs)
        assert request.known < request.total_length or request.phase is Phase.RUNNING
        assert request.pending_tokens <= request.pending_plans or request.phase is Phase.RUNNING
    audit_tenants(queue)


def _audit_phases(lane: Lane) -> None:
    """Checks that a lane is as its phases say."""
    phases, plans = lane.phases, len(lane.in_flight)
    assert phases == LanePhases(phases.seat, phases.stay, phases.weights), f"{lane.worker}: phases and flags differ"
    who = f"{lane.worker}, {phases.seat}, {phases.stay}, {phases.weights}"
    if not phases.serves:
        assert lane.rows.num_seated == 0 and lane.step <= 1, f"{who}: it has a request"
    assert phases.on_probation == (lane.proven_at == float("inf")), f"{who}: when it was proven"
    assert phases.on_probation or phases.serves or not plans, f"{who}: it has a plan in flight"
    assert not (phases.is_loading and plans), f"{who}: it has a plan in flight"
    if phases.stay is LanePhase.HANDING_OVER:
        assert phases.seat is LanePhase.SERVING and not phases.is_loading, f"{who}: it has no pool to hand over"
    if phases.stay is LanePhase.DISMISSED:
        assert phases.on_probation or not plans, f"{who}: it has a plan in flight"
    assert phases.seat is not LanePhase.REPLACED or not phases.stays, f"{who}: it gave its seat away"


def _audit_pages(lane: Lane) -> None:
    lane.pool.audit(Counter(page for row in lane.rows.seated().tolist() for page in lane.held_pages(row)))
    lane.host.audit()


# Arrays of `Rows`.
_COUNTERS = (
    *("confirmed", "planned", "known", "tokens_in_flight", "last", "verified", "num_pages", "plans_in_flight"),
    *("handle", "num_logprobs", "prompt_logprobs_from"),
)


def _audit_rows(core: Scheduler, lane: Lane, in_flight: _InFlightCounts) -> None:
    rows, page_size = lane.rows, lane.info.page_size
    at = rows.seated()
    seated: list[int] = at.tolist()
    assert rows.num_seated == len(seated) and rows.num_free + len(seated) == rows.max_rows
    assert rows.handle[0] == 0, "row 0 is seated"
    expected = rows.expected(at, rows.known[at])
    assert rows.remaining_bound >= expected.sum(), "the bound on remaining positions is too low"
    metered = [row for row in seated if rows.request_at(row).meter]
    assert rows.num_metered == len(metered) == np.count_nonzero(rows.meter[at])
    # Lists, because reading an element of an array takes ten times as long.
    lists = [getattr(rows, name).tolist() for name in _COUNTERS]
    confirmed, planned, known, tokens, last, verified, num_pages, plans, handles, num_logprobs, wanted_from = lists
    for row in seated:
        request = rows.requests[row]
        assert request is not None and request.row == row and request.handle == handles[row]
        assert request.worker == lane.worker, f"row {row} runs a request of another lane"
        assert core.queue.by_handle(request.handle) is request, f"row {row} runs a dead request"
        assert 0 <= confirmed[row] <= planned[row] <= min(known[row] + tokens[row], last[row]), (
            f"row {row}: confirmed {confirmed[row]}, planned {planned[row]}, known {known[row]}, "
            f"tokens in flight {tokens[row]}, last {last[row]}"
        )
        assert verified[row] <= confirmed[row]
        counted = plans[row], tokens[row]
        sent = in_flight.plans.get(handles[row], 0), in_flight.samples.get(handles[row], 0)
        assert counted == sent, f"row {row}: plans and tokens in flight are counted as {counted}, but {sent} were sent"
        total = (
            min(request.total_length, lane.info.longest_sequence)
            if request.submit.is_max_unset
            else request.total_length
        )
        assert known[row] < total and last[row] == total - 1
        assert num_pages[row] == len(rows.pages[row])
        assert num_pages[row] * page_size >= planned[row], f"row {row} computes past its pages"
        held = lane.held_pages(row)
        assert len(set(held)) == len(held), f"row {row} holds a page twice"
        _audit_cached_pages(lane, row, request)
        assert num_logprobs[row] == request.submit.num_logprobs
        unsent = _next_unsent(wanted_from[row], confirmed[row], request.prompt_tokens)
        assert request.prompt_logprobs_from == unsent, (
            f"row {row}: prompt logprobs sent up to {request.prompt_logprobs_from}, confirmed up to {unsent}"
        )
    num_with_logprobs = sum(num_logprobs[row] > 0 or wanted_from[row] > 0 for row in seated)
    assert rows.num_with_logprobs == num_with_logprobs, "rows that want logprobs are miscounted"
    assert rows.checksum == _slow_checksum(rows, planned, set(seated)), "the incremental checksum drifted"


def _audit_cached_pages(lane: Lane, row: int, request: Request) -> None:
    """Checks that a row never writes to a cached page and that it holds the pages which its window reads."""
    rows, pool, page_size = lane.rows, lane.pool, lane.info.page_size
    planned, held_from = int(rows.planned[row]), int(rows.held_from[row])
    for page_idx, page in enumerate(rows.pages[row]):
        is_held = page_idx < lane.sink_pages or page_idx >= held_from
        if (page_idx + 1) * page_size > planned and is_held:
            assert pool.hash_of(page) is None, f"row {row} will write page {page}, which is cached"
        if is_held and pool.hash_of(page) is not None and page_idx < len(request.page_hashes):
            assert pool.hash_of(page) == request.page_hashes[page_idx], f"row {row}: page {page} has another prefix"
    assert held_from <= max(lane.sink_pages, lane.first_seen_page(planned)), f"row {row} freed a page that it will read"
    assert int(rows.num_cached[row]) == int(rows.verified[row]) // page_size
    first = max(held_from, -(-int(rows.verified_from[row]) // page_size))
    verified = rows.pages[row][first : int(rows.num_cached[row])]
    assert not any(pool.is_unverified(page) for page in verified), f"row {row}: a verified page counts as unverified"


def _next_unsent(first: int, computed: int, prompt_tokens: int) -> int:
    """Returns the first prompt position with a wanted logprob that was not sent yet; 0 without one."""
    following = max(first, computed + 1)
    return following if first and following < prompt_tokens else 0


def _slow_checksum(rows: Rows, planned: list[int], seated: set[int]) -> int:
    """Returns the checksum by worker.proto's formula; for free rows, which have no page list, by the stored sum."""
    words = [row << 40 ^ i << 20 ^ page for row in seated for i, page in enumerate(rows.pages[row])]
    total = int(mix(np.array(words, np.uint64)).sum())
    for row, weight in enumerate(_weights(rows.max_rows)):
        total += planned[row] * weight + (0 if row in seated else rows.page_sum(row))
    return total % (1 << 64)


@cache
def _weights(max_rows: int) -> tuple[int, ...]:
    """Returns the weight W of each row; row 0 has weight 0."""
    rows = np.arange(1, max_rows + 1, dtype=np.uint64)
    return 0, *(mix(rows << np.uint64(40) ^ np.uint64(0xFFFFF)) | np.uint64(1)).tolist()


def _audit_prompt_logprobs(core: Scheduler, lane: Lane) -> None:
    """Checks that prompt logprobs in flight continue those that were sent, without overlap or gap."""
    following = {request.handle: request.prompt_logprobs_from for request in core.queue}
    for wanted in (wanted for record in lane.in_flight for wanted in record.wanted_prompt_logprobs):
        if wanted.handle in following:
            assert wanted.start == following[wanted.handle], (
                f"prompt logprobs continue at the wrong position {wanted.start}"
            )
            following[wanted.handle] += wanted.count
    for row in map(int, lane.rows.seated()):
        request = lane.rows.request_at(row)
        planned, first = int(lane.rows.planned[row]), int(lane.rows.prompt_logprobs_from[row])
        num_wanted = following[request.handle]
        assert _next_unsent(first, planned, request.prompt_tokens) == (
            num_wanted if num_wanted < request.prompt_tokens else 0
        ), f"row {row}: prompt logprobs up to {num_wanted} are asked for, {planned} positions are planned"
