"""Placement as a reference: the lane that plans asks every other lane about every waiting request.

It keeps nothing between two plans, so it takes O(lanes x requests x lanes) per tick. `Placement` must choose the same
lanes for one and two lanes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scheduler_svc.core import steps
from scheduler_svc.core.schedule.placement import ROW_TOKENS, Placement, backlog
from scheduler_svc.core.schedule.prefix_match import PrefixMatch, match_prefix
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


class PairwisePlacement(Placement):
    """For one plan, counts the requests that it leaves to each other lane."""

    num_left = 0

    def begin(self, lane: Lane) -> None:
        self._extra = {other.number: 0 for other in self.lanes}
        self._taken = {other.number: 0 for other in self.lanes}

    def end(self, lane: Lane) -> None:
        pass

    def started(self, lane: Lane, tokens: int) -> None:
        pass

    def is_for_others(self, lane: Lane, request: Request) -> bool:
        return False

    def starts_elsewhere(self, lane: Lane, request: Request, matched: PrefixMatch, closed: Lane | None) -> bool:
        known = request.known
        best, chosen = (backlog(lane) + known - matched.first_position, lane.number), None
        for other in self.lanes:
            if other is lane or other is closed or other.is_overdue(self._now) or other.schedule.is_blocked:
                continue
            if other.num_free_rows - self._taken[other.number] <= 0 or not other.info.holds(request.total_length):
                continue
            there = match_prefix(other, request)
            assert there is not None
            if other.info.pages_at_once(known) - len(there.pages) > other.pool.num_unused:
                continue
            key = backlog(other) + self._extra[other.number] + known - there.first_position, other.number
            if key < best:
                best, chosen = key, (other.number, known - there.first_position)
        if chosen is None:
            return False
        self._taken[chosen[0]] += 1
        self._extra[chosen[0]] += chosen[1] + ROW_TOKENS
        return True


@contextmanager
def pairwise() -> Iterator[None]:
    """Cores place requests by the reference while the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "Placement", PairwisePlacement)
        yield
