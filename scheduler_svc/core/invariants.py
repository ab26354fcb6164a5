"""What must be true of the core after every event. `audit` checks all of it, in O(everything): for tests and replay.

Owns nothing and changes nothing. Each broken rule is an AssertionError that names it.
"""

from collections import Counter
from functools import cache

import numpy as np

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Phase, Request
from scheduler_svc.core.state.rows import Rows, mix


def audit(core: Scheduler) -> None:
    """Raises AssertionError at the first rule that does not hold."""
    _audit_book(core)
    in_flight = {worker: _InFlight(core, lane) for worker, lane in core.lanes.items()}
    for worker, lane in core.lanes.items():
        assert lane.worker == worker
        _audit_pages(lane)
        _audit_rows(core, lane, in_flight[worker])
        _audit_prompt_asks(core, lane)
    for request in core.book:
        if not request.row:
            plans = sum(records.plans[request.handle] for records in in_flight.values())
            samples = sum(records.samples[request.handle] for records in in_flight.values())
            assert (request.late_plans, request.late_samples) == (plans, samples), (
                f"{request.request_id}: plans and samples in flight counted "
                f"{(request.late_plans, request.late_samples)}, recorded {(plans, samples)}"
            )


class _InFlight:
    """How often each request stands in a lane's plans in flight, and among those that they sample."""

    def __init__(self, core: Scheduler, lane: Lane) -> None:
        assert len(lane.in_flight) <= core.config.plans_in_flight, "more plans in flight than allowed"
        self.plans: Counter[int] = Counter()
        self.samples: Counter[int] = Counter()
        for record in lane.in_flight:
            handles = record.handles.tolist()
            self.plans.update(handles)
            self.samples.update(handles[i] for i in record.sampled.tolist())
            told = sum(ask.count for ask in record.prompt_asks)
            assert len(record.sampled) + told <= lane.info.logit_rows, "a plan wants more logits than the worker tells"


def _audit_book(core: Scheduler) -> None:
    book = core.book
    waiting = [request for request in book if request.phase is Phase.WAITING]
    assert book.num_waiting == len(waiting), f"{book.num_waiting} counted waiting, {len(waiting)} are"
    assert book.waiting_tokens == sum(request.known for request in waiting), "waiting tokens miscounted"
    assert sorted(r.handle for r in book.waiting()) == sorted(r.handle for r in waiting), "queue lost somebody"
    for request in book:
        assert request.phase is not Phase.ENDED, f"{request.request_id} ended and is still live"
        assert (request.row > 0) == (request.phase is Phase.RUNNING), f"{request.request_id}: phase and row differ"
        assert (request.worker in core.lanes) == (request.row > 0), f"{request.request_id}: row and lane differ"
        assert request.frontend in core.frontends, f"{request.request_id} belongs to a front end that is gone"
        assert request.num_outputs == sum(len(part) for part in request.outputs)
        assert request.known < request.total_length or request.phase is Phase.RUNNING
        assert request.late_samples <= request.late_plans or request.phase is Phase.RUNNING
    assert all(book.by_handle(handle) for handle in core.suspects), "a suspect is not live"


def _audit_pages(lane: Lane) -> None:
    pool, rows = lane.pool, lane.rows
    held = Counter(page for row in rows.seated().tolist() for page in lane.held_pages(row))
    unused = pool.free_pages()
    assert len(unused) == len(set(unused)) == pool.num_unused, "the list of unused pages and its count differ"
    assert 0 not in held and 0 not in unused, "page 0 is in use"
    assert not set(unused) & set(held), "an unused page is held"
    assert pool.num_unused + pool.num_used == pool.num_pages - 1
    for page in range(1, pool.num_pages):
        assert pool.references(page) == held[page], (
            f"page {page}: {pool.references(page)} references, {held[page]} holders"
        )
    names = [pool.name(page) for page in range(pool.num_pages)]
    named = {page: name for page, name in enumerate(names) if name is not None}
    assert len(named) == pool.num_indexed and len(set(named.values())) == len(named), "the index lost a page"
    assert all(pool.page_named(name) == page for page, name in named.items()), "the index names another page"
    assert pool.num_kept == sum(page in named for page in unused), "kept pages miscounted"
    lane.host.audit()


def _audit_rows(core: Scheduler, lane: Lane, in_flight: _InFlight) -> None:
    rows, page_size = lane.rows, lane.info.page_size
    seated: list[int] = rows.seated().tolist()
    assert rows.num_seated == len(seated) and rows.num_free + len(seated) == rows.max_rows
    assert rows.handle[0] == 0, "row 0 is seated"
    assert rows.most_left >= sum(rows.last[row] - rows.known[row] for row in seated), (
        "rows have more left than they had"
    )
    # Elements of lists: reading one of an array costs ten times as much, and there are many.
    confirmed, planned, known, samples, last, proven, num_pages, plans, handles, telling, told_from = (
        array.tolist()
        for array in (
            rows.confirmed,
            rows.planned,
            rows.known,
            rows.samples,
            rows.last,
            rows.proven,
            rows.num_pages,
            rows.plans,
            rows.handle,
            rows.num_logprobs,
            rows.prompt_logprobs_from,
        )
    )
    for row in seated:
        request = rows.requests[row]
        assert request is not None and request.row == row and request.handle == handles[row]
        assert request.worker == lane.worker, f"row {row} runs a request of another lane"
        assert core.book.by_handle(request.handle) is request, f"row {row} runs a dead request"
        assert 0 <= confirmed[row] <= planned[row] <= min(known[row] + samples[row], last[row]), (
            f"row {row}: confirmed {confirmed[row]}, planned {planned[row]}, known {known[row]}, "
            f"samples {samples[row]}, last {last[row]}"
        )
        assert proven[row] <= confirmed[row]
        counted, recorded = (plans[row], samples[row]), (in_flight.plans[handles[row]], in_flight.samples[handles[row]])
        assert counted == recorded, f"row {row}: plans and samples in flight counted {counted}, recorded {recorded}"
        assert known[row] < request.total_length and last[row] == request.total_length - 1
        assert num_pages[row] == len(rows.pages[row])
        assert num_pages[row] * page_size >= planned[row], f"row {row} computes past its pages"
        held = lane.held_pages(row)
        assert len(set(held)) == len(held), f"row {row} holds a page twice"
        _audit_names(lane, row, request)
        assert telling[row] == request.num_logprobs
        untold = _untold(told_from[row], confirmed[row], request.prompt_tokens)
        assert request.prompt_logprobs_from == untold, (
            f"row {row}: prompt logprobs told up to {request.prompt_logprobs_from}, confirmed up to {untold}"
        )
    num_telling = sum(telling[row] > 0 or told_from[row] > 0 for row in seated)
    assert rows.num_telling == num_telling, "rows that want logprobs miscounted"
    assert rows.checksum == _slow_checksum(rows, planned, set(seated)), "the incremental checksum drifted"


def _audit_names(lane: Lane, row: int, request: Request) -> None:
    """Nothing of a row will be written into a page that the index names, and what it holds of its window is there."""
    rows, pool, page_size = lane.rows, lane.pool, lane.info.page_size
    planned, held_from = int(rows.planned[row]), int(rows.held_from[row])
    for page_idx, page in enumerate(rows.pages[row]):
        is_held = page_idx < lane.sink_pages or page_idx >= held_from
        if (page_idx + 1) * page_size > planned and is_held:
            assert pool.name(page) is None, f"row {row} will write page {page}, which is kept for others"
        if is_held and pool.name(page) is not None and page_idx < len(request.page_hashes):
            assert pool.name(page) == request.page_hashes[page_idx], f"row {row}: page {page} has another past"
    assert held_from <= max(lane.sink_pages, lane.first_seen_page(planned)), f"row {row} freed what it will read"
    assert int(rows.sealed[row]) == int(rows.proven[row]) // page_size
    first = max(held_from, -(-int(rows.read_from[row]) // page_size))
    sealed = rows.pages[row][first : int(rows.sealed[row])]
    assert not any(pool.suspect[page] for page in sealed), f"row {row}: a page that was read is suspect"


def _untold(first: int, computed: int, prompt_tokens: int) -> int:
    """The first prompt position not told yet where they are wanted from `first` on; 0: none."""
    following = max(first, computed + 1)
    return following if first and following < prompt_tokens else 0


def _slow_checksum(rows: Rows, planned: list[int], seated: set[int]) -> int:
    """The seated rows' part from worker.proto's formula; ended rows' part as kept, their page lists are gone."""
    words = [row << 40 ^ i << 20 ^ page for row in seated for i, page in enumerate(rows.pages[row])]
    total = int(mix(np.array(words, np.uint64)).sum())
    for row, weight in enumerate(_weights(rows.max_rows)):
        total += planned[row] * weight + (0 if row in seated else rows.page_sum(row))
    return total % (1 << 64)


@cache
def _weights(max_rows: int) -> tuple[int, ...]:
    """W of each row; row 0 has none."""
    rows = np.arange(1, max_rows + 1, dtype=np.uint64)
    return 0, *(mix(rows << np.uint64(40) ^ np.uint64(0xFFFFF)) | np.uint64(1)).tolist()


def _audit_prompt_asks(core: Scheduler, lane: Lane) -> None:
    """What is in flight follows on what was told: nothing twice, nothing left out."""
    following = {request.handle: request.prompt_logprobs_from for request in core.book}
    for ask in (ask for record in lane.in_flight for ask in record.prompt_asks):
        if ask.handle in following:
            assert ask.start == following[ask.handle], f"prompt logprobs from {ask.start} on: not the next"
            following[ask.handle] += ask.count
    for row in map(int, lane.rows.seated()):
        request = lane.rows.request_at(row)
        planned, first = int(lane.rows.planned[row]), int(lane.rows.prompt_logprobs_from[row])
        told = following[request.handle]
        assert _untold(first, planned, request.prompt_tokens) == (told if told < request.prompt_tokens else 0), (
            f"row {row}: prompt logprobs up to {told} are asked for, {planned} positions are planned"
        )
