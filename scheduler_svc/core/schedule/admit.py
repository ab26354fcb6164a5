"""Whom a step admits: the next in order that a row, pages, budget and logits are there for.

Owns no state. Whole sequences only: admission by the first chunk alone thrashes, prompts throwing each other out
half-way. Beside them stays free what `policy.headroom` says. One that does not fit keeps those behind it out; one
that waits for something of its own (logits, a sibling's prompt, another lane) is passed by.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.schedule.placement import OtherLanes
from scheduler_svc.core.schedule.plan_builder import PlanBuilder
from scheduler_svc.core.schedule.policy import MAX_PASSED_OVER, chunk_tokens, headroom, headroom_bound
from scheduler_svc.core.schedule.prefix_match import NO_MATCH, PrefixMatch, match_prefix
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.request_queue import RequestQueue


def admit(builder: PlanBuilder, suspects: Collection[int], other_lanes: Sequence[Lane], policy: Policy) -> None:
    """Seats waiting requests while anything fits."""
    lane, queue = builder.lane, builder.queue
    if not queue.num_waiting or not lane.rows.num_free or builder.budget <= 0 or not lane.pool.num_unused:
        return
    head = queue.head()
    if head is None or _is_blocked(lane, head):
        return
    lane.schedule.unblock()
    chooser = _Chooser(builder, policy, suspects)
    others = OtherLanes([other for other in other_lanes if not other.is_overdue(builder.now)])
    while lane.rows.num_free and builder.budget > 0:
        request = chooser.next_up()
        if request is None or request.handle in suspects:
            return
        if request.pending_plans:
            if lane.awaits(request):
                return
            chooser.skip(request)  # another lane's, which may never answer
            continue
        if not lane.info.holds(request.total_length):
            chooser.skip(request)
            if _is_misfit(request, lane, other_lanes):
                queue.set_aside(request)
            continue
        if request.prompt_logprobs_from and not builder.room.has(lane.info.chunk_align):
            chooser.skip(request)
            continue
        siblings = queue.by_request_id(request.request_id)
        matched = match_prefix(
            lane, request, siblings, [start.row for start in builder.starts] if len(siblings) > 1 else ()
        )
        if matched is None or others.start_sooner(lane, request, matched):
            chooser.skip(request)
            continue
        if not builder.has_bytes_for(request, lane.pages_for(request.known)):
            return  # the next plan starts it
        count = _first_chunk(builder, request, matched, policy)
        if count == 0:
            return
        pages, unused = _pages_needed(lane, request, matched, count), lane.pool.num_unused
        if pages > unused or not _leaves_enough(lane, policy, unused - pages):
            if chooser.go_by_the_queue(request):
                continue
            # Who was skipped may be ready by the next plan, so then everybody is looked at again.
            handle, seated = 0 if chooser.has_skipped else head.handle, lane.rows.num_seated
            lane.schedule.block(handle, step=lane.step, num_seated=seated, pages=pages)
            return
        chooser.took(request)
        _seat(builder, request, matched, count)


def set_aside_misfits(queue: RequestQueue, lane: Lane, others: Sequence[Lane]) -> None:
    """Puts the queue's head aside while no lane can ever run it, so that whoever is behind it is the head."""
    while (head := queue.head()) is not None and _is_misfit(head, lane, others):
        queue.set_aside(head)


def _is_misfit(request: Request, lane: Lane, others: Sequence[Lane]) -> bool:
    return not any(one.info.holds(request.total_length) for one in (lane, *others))


def admit_alone(builder: PlanBuilder, request: Request) -> int:
    """Seats a suspect, the queue's head, computing everything anew: what was kept may be what broke its step.

    Returns its row; 0 where it does not fit. Its chunk is cut when its turn comes.
    """
    lane, info = builder.lane, builder.lane.info
    if not lane.rows.num_free or request.pending_plans or not info.holds(request.total_length):
        return 0
    count = _chunk_with_pages(lane, request, NO_MATCH, info.token_budget, to_spare=0)
    if _pages_needed(lane, request, NO_MATCH, count) > lane.pool.num_unused:
        return 0
    return builder.seat(request, NO_MATCH, _end_of_pages(lane, request, NO_MATCH, count))


def _leaves_enough(lane: Lane, policy: Policy, num_left: int) -> bool:
    """Whether so many unused pages are enough for those who run."""
    standing = policy.admission, lane.rows, lane.info, lane.schedule.expected_share
    return headroom_bound(*standing) <= num_left or headroom(*standing) <= num_left


def _is_blocked(lane: Lane, head: Request) -> bool:
    """Whether nothing has changed since the head did not fit."""
    return lane.schedule.still_blocks(
        head.handle, step=lane.step, num_seated=lane.rows.num_seated, num_unused=lane.pool.num_unused
    )


def _first_chunk(builder: PlanBuilder, request: Request, matched: PrefixMatch, policy: Policy) -> int:
    """Positions that the request would compute in this step; 0: the budget has no room for it."""
    lane = builder.lane
    remaining = request.known - matched.first_position
    if remaining == 1:
        return 1
    to_spare = headroom(policy.admission, lane.rows, lane.info, lane.schedule.expected_share) if lane.info.window else 0
    count = _chunk_with_pages(lane, request, matched, builder.budget, to_spare=to_spare)
    if count and request.prompt_logprobs_from:
        count = builder.room.cut(request, matched.first_position, count, lane.info.chunk_align)
    return count


def _chunk_with_pages(lane: Lane, request: Request, matched: PrefixMatch, budget: int, *, to_spare: int) -> int:
    """Positions of a first chunk that the budget, and with a window the unused pages but those, have room for."""
    align = lane.info.chunk_align
    count = chunk_tokens(remaining=request.known - matched.first_position, budget=budget, align=align)
    if lane.info.window:
        # Its pages come chunk by chunk, so that a text may be longer than the pool; one that took all that is unused
        # would wait for the last of those who run.
        pages = len(matched.pages) + lane.pool.num_unused - _num_unheld(lane, matched) - matched.num_loaded - to_spare
        count = min(count, max(0, pages * lane.info.page_size - matched.first_position) // align * align or count)
    return count


def _end_of_pages(lane: Lane, request: Request, matched: PrefixMatch, count: int) -> int:
    """Up to where pages are handed out at once: all that it knows; with a window, its first chunk."""
    return matched.first_position + count if lane.info.window else request.known


def _pages_needed(lane: Lane, request: Request, matched: PrefixMatch, count: int) -> int:
    """Unused pages that seating the request takes, with a window also those of its later chunks."""
    own = lane.pages_for(_end_of_pages(lane, request, matched, count)) - len(matched.pages) + matched.num_loaded
    return max(own, lane.info.pages_at_once(request.known) - len(matched.shared)) + _num_unheld(lane, matched)


def _num_unheld(lane: Lane, matched: PrefixMatch) -> int:
    """Kept pages that nobody holds: sharing them leaves fewer unused."""
    return sum(lane.pool.references(page) == 0 for page in matched.shared)


def _seat(builder: PlanBuilder, request: Request, matched: PrefixMatch, count: int) -> None:
    row = builder.seat(request, matched, _end_of_pages(builder.lane, request, matched, count))
    if request.known - matched.first_position == 1:
        builder.decode_at_once(row)
    else:
        builder.chunk(row, matched.first_position, count)


class _Chooser:
    """The order in which one step looks at those who wait.

    The queue's, but for this: of the first requests, as long as they are of the head's own tenant and priority, whoever
    finds most of its prompt kept goes first, before that is evicted. The head keeps its place, so passing it beyond a
    request of another tenant would delay that one too. Nobody is passed over more than `MAX_PASSED_OVER` times.
    """

    def __init__(self, builder: PlanBuilder, policy: Policy, suspects: Collection[int]) -> None:
        self._lane, self._queue, self._suspects = builder.lane, builder.queue, suspects
        self._skipped: set[int] = set()
        self._kept: dict[int, int] = {}
        self._may_be_passed = policy.cache_aware

    @property
    def has_skipped(self) -> bool:
        """Whether somebody waits for something else than room."""
        return bool(self._skipped)

    def go_by_the_queue(self, request: Request) -> bool:
        """From now on nobody passes anybody, since this one does not fit: it may not keep out whom it would pass.

        False: it is next in the queue itself.
        """
        self._may_be_passed = False
        return self.next_up() is not request

    def next_up(self) -> Request | None:
        """Whom to look at now; None: nobody is left among the first."""
        waiting = [entry[1] for entry in self._queue.first() if entry[1].handle not in self._skipped]
        if not waiting:
            return None
        head = waiting[0]
        if not self._may_be_passed or not head.prefix_root or head.passed_over >= MAX_PASSED_OVER:
            return head
        if head.pending_plans or head.handle in self._suspects:
            return head  # nobody passes it
        others = takewhile(lambda request: self._may_pass(request, head), waiting[1:])
        return max([head, *others], key=self._kept_pages)  # the first of the best

    def _may_pass(self, request: Request, head: Request) -> bool:
        alike = request.priority == head.priority and request.prefix_root == head.prefix_root
        return alike and not request.pending_plans and request.handle not in self._suspects

    def skip(self, request: Request) -> None:
        """It waits for something that others do not."""
        self._skipped.add(request.handle)

    def took(self, request: Request) -> None:
        """It is being admitted, before those of its kind that stand ahead of it."""
        for _, other in self._queue.first():
            if other is request:
                return
            if other.prefix_root == request.prefix_root and other.handle not in self._skipped:
                other.pass_over()

    def _kept_pages(self, request: Request) -> int:
        """Leading pages of its that the lane has."""
        known = self._kept.get(request.handle)
        if known is None:
            request.hash_known(self._lane.info.page_size)
            known = 0
            if request.cache_read:
                for page_hash in request.page_hashes:
                    if not self._lane.pool.page_with_hash(page_hash):
                        break
                    known += 1
            self._kept[request.handle] = known
        return known
