"""What must be true of the core after every event. `audit` checks all of it, in O(everything): for tests and replay.

Owns nothing and changes nothing. Each broken rule is an AssertionError that names it.
"""

from collections import Counter

import numpy as np

from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Phase, Request
from scheduler_svc.core.rows import Rows, mix
from scheduler_svc.core.scheduler import Scheduler


def audit(core: Scheduler) -> None:
    """Raises AssertionError at the first rule that does not hold."""
    _audit_book(core)
    for worker, lane in core.lanes.items():
        assert lane.worker == worker
        _audit_pages(lane)
        _audit_rows(core, lane)
        _audit_in_flight(core, lane)


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


def _audit_rows(core: Scheduler, lane: Lane) -> None:
    rows, page_size = lane.rows, lane.info.page_size
    seated = rows.seated()
    assert rows.num_seated == len(seated) and rows.num_free + len(seated) == rows.max_rows
    assert rows.handle[0] == 0, "row 0 is seated"
    for row in map(int, seated):
        request = rows.requests[row]
        assert request is not None and request.row == row and request.handle == rows.handle[row]
        assert request.worker == lane.worker, f"row {row} runs a request of another lane"
        assert core.book.by_handle(request.handle) is request, f"row {row} runs a dead request"
        confirmed, planned, known, samples, last = (
            int(array[row]) for array in (rows.confirmed, rows.planned, rows.known, rows.samples, rows.last)
        )
        assert 0 <= confirmed <= planned <= min(known + samples, last), (
            f"row {row}: confirmed {confirmed}, planned {planned}, known {known}, samples {samples}, last {last}"
        )
        assert int(rows.proven[row]) <= confirmed
        assert known < request.total_length and last == request.total_length - 1
        assert rows.num_pages[row] == len(rows.pages[row])
        assert len(rows.pages[row]) * page_size >= planned, f"row {row} computes past its pages"
        assert len(set(lane.held_pages(row))) == len(lane.held_pages(row)), f"row {row} holds a page twice"
        _audit_names(lane, row, request)
        assert rows.num_logprobs[row] == request.sampling.num_logprobs
        untold = _untold(int(rows.prompt_logprobs_from[row]), confirmed, request.prompt_tokens)
        assert request.prompt_logprobs_from == untold, (
            f"row {row}: prompt logprobs told up to {request.prompt_logprobs_from}, confirmed up to {untold}"
        )
    telling = (rows.num_logprobs[seated] > 0) | (rows.prompt_logprobs_from[seated] > 0)
    assert rows.num_telling == telling.sum(), "rows that want logprobs miscounted"
    assert rows.checksum == _slow_checksum(rows), "the incremental checksum drifted"


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
    sealed = [page for i, page in enumerate(rows.pages[row][: int(rows.sealed[row])]) if i >= held_from]
    assert not any(pool.suspect[page] for page in sealed), f"row {row}: a page that was read is suspect"


def _untold(first: int, computed: int, prompt_tokens: int) -> int:
    """The first prompt position not told yet where they are wanted from `first` on; 0: none."""
    following = max(first, computed + 1)
    return following if first and following < prompt_tokens else 0


def _slow_checksum(rows: Rows) -> int:
    """The seated rows' part from worker.proto's formula; ended rows' part as kept, their page lists are gone."""
    total = 0
    for row in range(1, rows.max_rows + 1):
        weight = int(mix(np.array([row << 40 ^ 0xFFFFF], np.uint64))[0]) | 1
        pages = rows.page_sum(row)
        if rows.handle[row]:
            words = [row << 40 ^ i << 20 ^ page for i, page in enumerate(rows.pages[row])]
            pages = int(mix(np.array(words, np.uint64)).sum())
        total += int(rows.planned[row]) * weight + pages
    return total % (1 << 64)


def _audit_in_flight(core: Scheduler, lane: Lane) -> None:
    assert len(lane.in_flight) <= core.config.plans_in_flight, "more plans in flight than allowed"
    plans: Counter[int] = Counter()
    samples: Counter[int] = Counter()
    for record in lane.in_flight:
        plans.update(int(handle) for handle in record.handles)
        samples.update(int(handle) for handle in record.handles[record.sampled])
        told = sum(ask.count for ask in record.prompt_asks)
        assert len(record.sampled) + told <= lane.info.logit_rows, "a plan wants more logits than the worker tells"
    _audit_prompt_asks(core, lane)
    for request in core.book:
        at = request.row
        counted = (lane.rows.plans[at], lane.rows.samples[at]) if at else (request.late_plans, request.late_samples)
        assert counted == (plans[request.handle], samples[request.handle]), (
            f"{request.request_id}: plans and samples in flight counted {counted}, "
            f"recorded {(plans[request.handle], samples[request.handle])}"
        )


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
