"""Admits waiting requests to a plan while rows, pages, token budget and logit rows last.

A request is admitted only if there are pages for all of its known tokens. If only its first chunk had to fit, prompts
would preempt each other half-way. In addition, `policy.headroom` pages must stay free. If a request does not fit, no
later request is admitted. A request is skipped if it waits for something that later requests do not need: logit rows,
the prompt of a sibling (another sample of the same request), another lane (`placement`), a resource.

**Order.** Requests are considered in the order of the queue, with one exception, cache-aware order: of the queue's head
and the requests right behind it that have the same tenant, salt and priority, the request with the most cached pages
goes first, so that it still finds them in the cache. A request with another of these ends the search, so that it is
never overtaken. A request is overtaken at most `MAX_PASSED_OVER` times.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.queue.turns import WINDOW, trial_key
from scheduler_svc.core.schedule.placement import Placement
from scheduler_svc.core.schedule.plan_builder import PlanBuilder
from scheduler_svc.core.schedule.policy import MAX_PASSED_OVER, before_sampling, chunk_tokens, headroom, headroom_bound
from scheduler_svc.core.schedule.prefix_match import NO_MATCH, PrefixMatch, match_prefix
from scheduler_svc.core.state.lane import Lane, holds, may_sample, may_start, want
from scheduler_svc.core.state.request import Request


class AdmissionOrder:
    """The order for one plan of `lane`."""

    def __init__(self, lane: Lane, queue: RequestQueue, placement: Placement, *, cache_aware: bool) -> None:
        """The plan looks at the first `WINDOW` requests without those that `placement` has for other lanes."""
        self._lane, self._queue, self._placement = lane, queue, placement
        # The first requests for this lane, and those of them to consider. None: the queue has changed since then.
        self._first: list[Request] | None = None
        self._waiting: list[Request] = []
        self.skipped: set[int] = set()
        """Handles of requests that may be admitted to the next plan."""
        self._cached_pages: dict[int, int] = {}
        self._may_overtake = cache_aware

    def next(self) -> Request | None:
        """Returns the request to consider now, or None if none is left among the first that wait."""
        if self._first is None:
            self._first = self._placement.first_of(self._lane, self._queue, WINDOW)
            self._waiting = [request for request in self._first if request.handle not in self.skipped]
        waiting = self._waiting
        if not waiting:
            return None
        head = waiting[0]
        if (
            len(waiting) == 1
            or not self._may_overtake
            or not head.submit.prefix_root
            or head.passed_over >= MAX_PASSED_OVER
        ):
            return head
        if head.pending_plans:
            return head  # it is never overtaken
        peer = head.submit.priority, head.submit.prefix_root
        candidates = takewhile(
            lambda one: (one.submit.priority, one.submit.prefix_root) == peer and not one.pending_plans, waiting[1:]
        )
        return max([head, *candidates], key=self._num_cached_pages)  # the first of several with the most

    def skip(self, request: Request) -> None:
        """Leaves the request out of this plan, so that the next one is considered."""
        self.skipped.add(request.handle)
        self._waiting.remove(request)

    def queue_changed(self) -> None:
        """Reads the queue again before the next request."""
        self._first = None

    def stop_overtaking(self, request: Request) -> bool:
        """Keeps to the order of the queue for the rest of the plan, because the chosen request does not fit.

        Returns whether another request is next in that order.
        """
        self._may_overtake = False
        return self.next() is not request

    def admitted(self, request: Request) -> None:
        """Counts one overtaking for each request of the same tenant and salt that is ahead of this one in the queue."""
        first, self._first = self._first or (), None
        for other in first:
            if other is request:
                return
            if other.submit.prefix_root == request.submit.prefix_root and other.handle not in self.skipped:
                other.passed_over += 1

    def _num_cached_pages(self, request: Request) -> int:
        """Returns how many leading pages of the request the lane has cached."""
        count = self._cached_pages.get(request.handle)
        if count is None:
            request.hash_known(self._lane.info.page_size)
            count = 0
            if request.submit.cache_read:
                for page_hash in request.page_hashes:
                    if not self._lane.pool.page_with_hash(page_hash):
                        break
                    count += 1
            self._cached_pages[request.handle] = count
        return count


class _Refusal(Enum):
    """Why a request is not admitted to this plan, and what follows for later requests."""

    SKIP = "it waits for something that later requests do not need; the next one is considered"
    STOP = "it must start before later requests, but not in this plan; no further request is admitted"


@dataclass(frozen=True, slots=True)
class _Start:
    """How a request starts: it computes `count` positions after its prefix match in this step."""

    matched: PrefixMatch
    count: int
    pages: int
    """Number of unused pages that it needs."""


def admit(builder: PlanBuilder, *, tenant: str | None = None) -> None:
    """Gives rows to waiting requests, as far as rows, pages and budgets allow; only to `tenant` if it is given."""
    lane, queue, placement, stops_at = builder.lane, builder.queue, builder.placement, builder.turn.stops_at
    if not queue.num_waiting or not lane.num_free_rows or builder.budget <= 0 or not lane.pool.num_unused:
        return
    head = queue.head()
    if head is None or (lane.rows.num_seated and lane.schedule.blocked == (head.handle, lane.pool.num_releases)):
        return
    lane.schedule.blocked = None
    placement.begin(lane)
    order = AdmissionOrder(lane, queue, placement, cache_aware=builder.policy.cache_aware)
    while lane.num_free_rows and builder.budget > 0:
        request = order.next()
        if request is None or (tenant is not None and request.submit.tenant != tenant):
            return
        if stops_at is not None and trial_key(request) > stops_at:
            return
        if not queue.may_take_row(request, placement.num_rows):
            queue.park(request.submit.tenant)
            order.queue_changed()
            continue
        verdict = _judge(builder, request)
        if verdict is _Refusal.SKIP:
            order.skip(request)
            if not request.pending_plans and not placement.holds(request):
                queue.set_aside(request)
                order.queue_changed()
        elif verdict is _Refusal.STOP:
            return
        elif not _has_room(builder, verdict):
            if order.stop_overtaking(request):
                continue
            # If a request was skipped, block with handle 0: other lanes see this lane as blocked, but its next plan
            # checks the queue again, because the skipped request may be ready then.
            handle = 0 if order.skipped else head.handle
            lane.schedule.blocked = handle, lane.pool.num_releases
            return
        else:
            order.admitted(request)
            placement.started(lane, request.known - verdict.matched.first_position)
            _start(builder, request, verdict)


def admit_suspects(builder: PlanBuilder) -> None:
    """Starts the trial's waiting suspects, in order, as far as rows, pages and budgets allow, without headroom."""
    lane = builder.lane
    for request in builder.turn.suspects:
        if not lane.num_free_rows or builder.budget <= 0:
            return
        verdict = _judge(builder, request)
        if verdict is _Refusal.SKIP:
            continue
        if verdict is _Refusal.STOP or verdict.pages > lane.pool.num_unused:
            return
        _start(builder, request, verdict)


def _judge(builder: PlanBuilder, request: Request) -> _Start | _Refusal:
    """Decides how the request starts in this plan, or why it does not. The caller checks the free pages."""
    lane = builder.lane
    if request.pending_plans:
        # Its plans in flight may add tokens, so it waits for their results. Those of another lane may take long.
        return _Refusal.STOP if lane.awaits(request) and not builder.turn.is_trial else _Refusal.SKIP
    if not holds(lane, request):
        return _Refusal.SKIP
    if request.prompt_logprobs_from and builder.logit_rows_left() < lane.info.chunk_align:
        return _Refusal.SKIP
    matched = _match(builder, request)
    if matched is None:
        return _Refusal.SKIP
    if request.needs:
        want(lane, request)
        if not _may_begin(lane, request, matched):
            return _Refusal.SKIP
    if not builder.has_bytes_for(request, lane.pages_for(request.known)):
        return _Refusal.STOP  # the next plan starts it
    count = _first_chunk(builder, request, matched)
    if count == 0:
        return _Refusal.STOP
    return _Start(matched, count, _pages_needed(lane, request, matched, count))


def _match(builder: PlanBuilder, request: Request) -> PrefixMatch | None:
    """Finds what the lane has of the request. Leaves it to another lane, or to a sibling's prompt, if None."""
    lane, turn = builder.lane, builder.turn
    if turn.is_trial:
        return match_prefix(lane, request) if turn.uses_cache else NO_MATCH
    siblings = builder.queue.by_request_id(request.submit.request_id)
    newly_seated = [start.row for start in builder.starts] if len(siblings) > 1 else ()
    matched = match_prefix(lane, request, siblings, newly_seated)
    if matched is None or builder.placement.starts_elsewhere(lane, request, matched, turn.closed):
        return None
    return matched


def _has_room(builder: PlanBuilder, start: _Start) -> bool:
    """Returns whether the headroom for the running rows is still free after the request has got its pages."""
    lane, admission = builder.lane, builder.policy.admission
    num_left = lane.pool.num_unused - start.pages
    return num_left >= 0 and (headroom_bound(lane, admission) <= num_left or headroom(lane, admission) <= num_left)


def _start(builder: PlanBuilder, request: Request, start: _Start) -> None:
    matched = start.matched
    row = builder.seat(request, matched, _end_of_pages(builder.lane, request, matched, start.count))
    if request.known - matched.first_position == 1:
        builder.decode_at_once(row)
    else:
        builder.chunk(row, matched.first_position, start.count)


def set_aside_misfits(builder: PlanBuilder) -> None:
    """Sets aside each request at the queue's head that no present lane can ever run."""
    lane, queue = builder.lane, builder.queue
    while (head := queue.head()) is not None and not (holds(lane, head) or builder.placement.holds(head)):
        queue.set_aside(head)


def _may_begin(lane: Lane, request: Request, matched: PrefixMatch) -> bool:
    """Returns whether a request has something to compute: it may sample, or it may start and has positions before."""
    left = request.known - matched.first_position
    return may_sample(lane, request) or (may_start(lane, request) and before_sampling(left, lane.info.chunk_align) > 0)


def _first_chunk(builder: PlanBuilder, request: Request, matched: PrefixMatch) -> int:
    """Decides how many positions the request computes in this step; 0 if the token budget is too small."""
    lane = builder.lane
    if request.known - matched.first_position == 1:
        return 1
    headroom_pages = 0
    if lane.info.window:
        headroom_pages = headroom(lane, builder.policy.admission)
    count = _chunk_with_pages(lane, request, matched, builder.budget, headroom_pages=headroom_pages)
    if count and request.prompt_logprobs_from:
        count = builder.take_logit_rows(request, matched.first_position, count)
    return count


def _chunk_with_pages(lane: Lane, request: Request, matched: PrefixMatch, budget: int, *, headroom_pages: int) -> int:
    """Returns the size of a first chunk that fits the token budget and, with a window, the unused pages."""
    align = lane.info.chunk_align
    remaining = request.known - matched.first_position
    if not may_sample(lane, request):
        remaining = before_sampling(remaining, align)
    count = chunk_tokens(remaining=remaining, budget=budget, align=align)
    if lane.info.window:
        # With a window pages are allocated chunk by chunk, so that a prompt may be longer than the pool. If a
        # chunk needed more than the unused pages, it would wait until the last running row ends.
        unused = lane.pool.num_unused - _num_unreferenced(lane, matched) - matched.num_loaded - headroom_pages
        end = (len(matched.pages) + unused) * lane.info.page_size
        count = min(count, max(0, end - matched.first_position) // align * align or count)
    return count


def _end_of_pages(lane: Lane, request: Request, matched: PrefixMatch, count: int) -> int:
    """Returns the number of positions that get pages now: all known ones, or with a window those of the first chunk."""
    return matched.first_position + count if lane.info.window else request.known


def _pages_needed(lane: Lane, request: Request, matched: PrefixMatch, count: int) -> int:
    """Returns how many unused pages the request needs; with a window, its later chunks included."""
    at_its_end = lane.pages_for(_end_of_pages(lane, request, matched, count)) - len(matched.pages) + matched.num_loaded
    at_once = lane.info.pages_at_once(request.known) - len(matched.shared)
    return max(at_its_end, at_once) + _num_unreferenced(lane, matched)


def _num_unreferenced(lane: Lane, matched: PrefixMatch) -> int:
    """Returns how many cached pages of the match no row holds. If they are shared, fewer unused pages are left."""
    return sum(lane.pool.references(page) == 0 for page in matched.shared)
