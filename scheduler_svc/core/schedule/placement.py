"""Chooses the lane that would give a waiting request its first token soonest.

Requests wait in one queue and are not assigned to a lane. When a lane plans, it takes the next request unless another
lane would start it sooner: backlog plus uncached tokens of the request are compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.schedule.prefix_match import PrefixMatch, match_prefix
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request

ROW_TOKENS = 32
"""Delay that a running row causes to a new request, in prompt tokens."""


@dataclass(slots=True)
class _LaneLoad:
    """Backlog and free rows of another lane, including the requests that this plan leaves to it."""

    backlog: int
    free_rows: int

    def leave(self, tokens: int) -> None:
        """Counts a request that this plan leaves to the lane, where it computes `tokens` before its first token."""
        self.free_rows -= 1
        self.backlog += tokens + ROW_TOKENS


class OtherLanes:
    """The lanes that compete with the planning lane for waiting requests, for one plan.

    When a request is left to a lane, its tokens are added to that lane's backlog. Otherwise one plan would leave every
    waiting request to the lane that has the shortest backlog now.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._loads: dict[int, _LaneLoad] = {}

    def start_sooner(self, lane: Lane, request: Request, matched: PrefixMatch) -> bool:
        """Returns whether another lane with room would start the request before `lane`; if so, leaves it to that lane.

        If lanes are equally fast, the one with the lowest number starts it.
        """
        if not self._lanes:
            return False
        best, chosen, tokens = (_delay(lane, request, matched), lane.number), None, 0
        known = request.known
        for other in self._lanes:
            load = self._load(other)
            # At least one token is left to compute, so this check excludes most lanes at low cost.
            if (load.backlog + 1, other.number) > best or load.free_rows <= 0:
                continue
            if other.schedule.is_blocked or not other.info.holds(request.total_length):
                continue
            first, num_pages = _lookup(other, request)
            if other.info.pages_at_once(known) - num_pages > other.pool.num_unused:
                continue
            remaining = known - first
            key = (load.backlog + remaining, other.number)
            if key < best:
                best, chosen, tokens = key, load, remaining
        if chosen is None:
            return False
        chosen.leave(tokens)
        return True

    def _load(self, lane: Lane) -> _LaneLoad:
        load = self._loads.get(lane.number)
        if load is None:
            load = _LaneLoad(backlog=backlog(lane), free_rows=lane.num_free_rows)
            self._loads[lane.number] = load
        return load


def _lookup(lane: Lane, request: Request) -> tuple[int, int]:
    """Returns the position at which the request would start on another lane, and its number of matched pages there.

    That lane keeps the answer until it plans or gets a result. Otherwise every lane would match every waiting request
    on every other lane for each plan.
    """
    found = lane.schedule.lookup(request.handle, request.known)
    if found is None:
        there = match_prefix(lane, request)
        assert there is not None, "match_prefix returns None only if siblings are passed"
        found = there.first_position, len(there.pages)
        lane.schedule.store_lookup(request.handle, request.known, found)
    return found


def backlog(lane: Lane) -> int:
    """Returns the work that the lane has not planned yet, in prompt tokens."""
    rows = lane.rows
    seated = rows.seated()
    return int((rows.known[seated] - rows.planned[seated]).clip(0).sum()) + ROW_TOKENS * len(seated)


def _delay(lane: Lane, request: Request, matched: PrefixMatch) -> int:
    """Returns how many prompt tokens the lane would compute before the request's first token."""
    return backlog(lane) + request.known - matched.first_position


def by_backlog(lanes: Iterable[Lane]) -> list[Lane]:
    """Returns the lanes, shortest backlog first."""
    ordered = list(lanes)
    return ordered if len(ordered) < 2 else sorted(ordered, key=lambda lane: (backlog(lane), lane.number))
