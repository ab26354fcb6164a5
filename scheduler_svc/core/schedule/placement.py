"""Chooses the lane that would give a waiting request its first token soonest.

Requests wait in one queue. In each tick one `Placement` assigns them: it compares backlog plus uncached tokens of the
request over all lanes. A lane that plans takes the requests that no other lane would start sooner. It *leaves* the
others to the lane that would; that lane looks at them in its own plan, and the remaining lanes skip them. So each tick
looks at each request about twice, for any number of lanes. An assignment lasts for one tick, because steps end and
requests arrive before the next one.

The lanes are sorted by backlog, and `PageIndex` gives for all lanes at once how many pages of a request they have. The
search for the best lane ends at the first lane whose backlog alone is too long.
"""

from bisect import insort
from collections.abc import Sequence, Set
from dataclasses import dataclass

from scheduler_svc.core.pages.page_index import PageIndex
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.prefix_match import PrefixMatch, cached_limit, match_prefix
from scheduler_svc.core.state.lane import Lane, holds, may_sample
from scheduler_svc.core.state.lane_schedule import MAX_LOOKUPS
from scheduler_svc.core.state.request import Request

ROW_TOKENS = 32
"""Delay that a running row causes to a new request, in prompt tokens."""


@dataclass(slots=True, eq=False)
class _Load:
    """Backlog and free rows of a lane when the tick began, with the requests that it starts and that are left to it.

    What it starts still counts when it is planned, because computing it takes time.
    """

    lane: Lane
    backlog: int
    free_rows: int

    def charge(self, tokens: int, count: int = 1) -> None:
        """Counts `count` requests (-1: takes one back) that the lane starts with `tokens` left to compute."""
        self.free_rows -= count
        self.backlog += count * (tokens + ROW_TOKENS)

    def takes(self, request: Request, *, prepared: bool) -> bool:
        """Returns whether the lane has a row for the request; if `prepared`, also what it needs."""
        lane = self.lane
        if self.free_rows <= 0 or lane.schedule.blocked or not holds(lane, request):
            return False
        return not prepared or may_sample(lane, request)


@dataclass(frozen=True, slots=True)
class _Left:
    """A request that the plan of lane number `by` has left to lane number `to`, where it computes `tokens`."""

    by: int
    to: int
    tokens: int


class Placement:
    """The assignment of waiting requests to `lanes`, which serve, for the plans of one tick.

    Call `begin` before a lane looks at the queue and `end` after its plan was made.
    """

    def __init__(self, lanes: Sequence[Lane], page_index: PageIndex | None = None, *, now: float = 0.0) -> None:
        """`page_index` has the pages of the lanes."""
        self.lanes = lanes
        self._page_index = PageIndex() if page_index is None else page_index
        # Lanes of workers that take too long for a step do not count as an alternative.
        self._rivals = {lane.number: lane for lane in lanes if not lane.is_overdue(now)} if len(lanes) > 1 else {}
        self._loads: dict[int, _Load] = {}
        # The loads of `_rivals`, shortest backlog first.
        self._order: list[_Load] = []
        self._left: dict[int, _Left] = {}
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of all lanes."""
        self._num_rows = self._num_rows or sum(lane.info.max_rows for lane in self.lanes)
        return self._num_rows

    def holds(self, request: Request) -> bool:
        """Returns whether a lane is large enough for the request."""
        return any(holds(lane, request) for lane in self.lanes)

    def first_of(self, lane: Lane, queue: RequestQueue, count: int) -> list[Request]:
        """Returns the first `count` waiting requests, in order, that no other lane has left to a third one.

        What was left to a lane that must prepare first is also for a lane without rows that need not.
        """
        if not self._left:
            return [request for _, request in queue.first(count)]
        first: list[Request] = []
        number, left_of = lane.number, self._left.get
        for _, request in queue.first(count + len(self._left)):
            left = left_of(request.handle)
            if left is None or number in (left.by, left.to) or self._starts_now(lane, left, request):
                first.append(request)
                if len(first) == count:
                    break
        return first

    # The plan of one lane --------------------------------------------------------------------------------------------

    def begin(self, lane: Lane) -> None:
        """Lets the lane consider again what was left to it, and what it has left to others."""
        if not self._rivals:
            return
        if not self._loads:
            for one in self.lanes:
                load = self._loads[one.number] = _Load(one, backlog(one), one.num_free_rows)
                if one.number in self._rivals:
                    insort(self._order, load, key=_standing)
        number = lane.number
        self._take_back([handle for handle, left in self._left.items() if number in (left.by, left.to)])

    def end(self, lane: Lane) -> None:
        """Ends the lane's plan. What was left to it and did not start may start elsewhere."""
        if self._left:
            self._take_back([handle for handle, left in self._left.items() if left.to == lane.number])

    def was_left_to(self, numbers: Set[int]) -> bool:
        """Returns whether a request was left to one of these lanes after that lane ended its plan."""
        return any(left.to in numbers for left in self._left.values())

    def started(self, lane: Lane, tokens: int) -> None:
        """Counts a request that the lane starts in the plan being made, with `tokens` left to compute."""
        if self._rivals:
            self._charge(self._loads[lane.number], tokens)

    def starts_elsewhere(self, lane: Lane, request: Request, matched: PrefixMatch, closed: Lane | None) -> bool:
        """Leaves the request to another lane with room that would start it sooner. Returns whether there is one.

        `closed` does not count. If lanes are equally fast, the one with the lowest number starts the request.
        """
        if not self._rivals:
            return False
        known = request.known
        best = self._loads[lane.number].backlog + known - matched.first_position, lane.number
        chosen: _Load | None = None
        # Then it does not wait for a lane that must prepare what it needs first.
        is_ready = bool(request.needs) and may_sample(lane, request)
        depths = self._depths(request)
        least = max(1, known - (depths[0][1] * lane.info.page_size if depths else 0))
        for load in self._order:
            other = load.lane
            if (load.backlog + least, other.number) >= best:
                break
            if other is lane or other is closed or not load.takes(request, prepared=is_ready):
                continue
            depth = _depth(depths, other)
            if other.info.pages_at_once(known) - depth > other.pool.num_unused:
                continue
            key = load.backlog + known - depth * lane.info.page_size, other.number
            if key < best:
                best, chosen = key, load
        if chosen is None:
            return False
        self._leave(request, lane, chosen, best[0] - chosen.backlog)
        return True

    def _depths(self, request: Request) -> list[tuple[int, int]]:
        """Returns how many of its first pages each lane need not compute: (lanes as bits, pages), most first."""
        page_size = self.lanes[0].info.page_size
        limit = cached_limit(request, page_size)
        if not limit:
            return []
        if not self.lanes[0].info.window:
            return self._page_index.depths(request.page_hashes[:limit])
        # A match needs only the pages in a window, so each lane with one of the pages is asked.
        some = self._page_index.any_of(request.page_hashes[:limit])
        asked = [lane for lane in self._rivals.values() if lane.pages.bit & some]
        return sorted(((lane.pages.bit, _pages(lane, request)) for lane in asked), key=lambda depth: -depth[1])

    def _starts_now(self, lane: Lane, left: _Left, request: Request) -> bool:
        """Returns whether the lane has no rows and all that the request needs, other than the one it was left to."""
        if not request.needs or lane.rows.num_seated or may_sample(self._loads[left.to].lane, request):
            return False
        return may_sample(lane, request)

    # Loads -----------------------------------------------------------------------------------------------------------

    def _leave(self, request: Request, by: Lane, to: _Load, tokens: int) -> None:
        if request.handle in self._left:
            self._take_back([request.handle])
        self._charge(to, tokens)
        self._left[request.handle] = _Left(by.number, to.lane.number, tokens)

    def _take_back(self, handles: Sequence[int]) -> None:
        for handle in handles:
            left = self._left.pop(handle)
            self._charge(self._loads[left.to], left.tokens, -1)

    def _charge(self, load: _Load, tokens: int, count: int = 1) -> None:
        is_rival = load.lane.number in self._rivals
        if is_rival:
            self._order.remove(load)
        load.charge(tokens, count)
        if is_rival:
            insort(self._order, load, key=_standing)


def _depth(depths: list[tuple[int, int]], lane: Lane) -> int:
    return next((pages for lanes, pages in depths if lanes & lane.pages.bit), 0)


def _standing(load: _Load) -> tuple[int, int]:
    return load.backlog, load.lane.number


def _pages(lane: Lane, request: Request) -> int:
    """Returns the number of pages that a lane with a window need not compute. It keeps the answer until it plans."""
    lookups, key = lane.schedule.lookups, (request.handle, request.known)
    if key not in lookups:
        there = match_prefix(lane, request)
        assert there is not None, "match_prefix returns None only if siblings are passed"
        if len(lookups) >= MAX_LOOKUPS:
            lookups.clear()
        lookups[key] = len(there.pages)
    return lookups[key]


def backlog(lane: Lane) -> int:
    """Returns the work that the lane has not planned yet, in prompt tokens."""
    rows = lane.rows
    seated = rows.seated()
    return int((rows.known[seated] - rows.planned[seated]).clip(0).sum()) + ROW_TOKENS * len(seated)
