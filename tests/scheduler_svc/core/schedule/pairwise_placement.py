"""Placement as a reference: the lane that plans asks every other lane about every waiting request.

It takes O(lanes x requests x lanes) per tick. `Placement` must choose the same lanes for one and two lanes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import pytest

from scheduler_svc.core import steps
from scheduler_svc.core.pages.page_index import PageIndex
from scheduler_svc.core.schedule.placement import ROW_TOKENS, Placement, backlog
from scheduler_svc.core.schedule.prefix_match import PrefixMatch, match_prefix
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


class PairwisePlacement(Placement):
    """Counts what each lane starts in the tick, and what the lane that plans leaves to each other one."""

    def __init__(self, lanes: Sequence[Lane], page_index: PageIndex | None = None, *, now: float = 0.0) -> None:
        super().__init__(lanes, page_index, now=now)
        self._now = now

    def begin(self, lane: Lane) -> None:
        if not self._started:
            self._started.update({other.number: (backlog(other), other.num_free_rows) for other in self.lanes})
        self._left_to = {other.number: (0, 0) for other in self.lanes}

    def end(self, lane: Lane) -> None:
        pass

    def started(self, lane: Lane, tokens: int) -> None:
        self._started[lane.number] = _charged(self._started[lane.number], tokens)

    def _load(self, lane: Lane) -> tuple[int, int]:
        (tokens, rows), (more, fewer) = self._started[lane.number], self._left_to[lane.number]
        return tokens + more, rows + fewer

    def starts_elsewhere(self, lane: Lane, request: Request, matched: PrefixMatch, closed: Lane | None) -> bool:
        known = request.known
        best, chosen = (self._load(lane)[0] + known - matched.first_position, lane.number), None
        for other in self.lanes:
            if other is lane or other is closed or other.is_overdue(self._now) or other.schedule.blocked:
                continue
            tokens, rows = self._load(other)
            if rows <= 0 or not other.info.holds(request.total_length):
                continue
            there = match_prefix(other, request)
            assert there is not None
            if other.info.pages_at_once(known) - len(there.pages) > other.pool.num_unused:
                continue
            key = tokens + known - there.first_position, other.number
            if key < best:
                best, chosen = key, (other.number, known - there.first_position)
        if chosen is None:
            return False
        self._left_to[chosen[0]] = _charged(self._left_to[chosen[0]], chosen[1])
        return True

    @cached_property
    def _started(self) -> dict[int, tuple[int, int]]:
        return {}


def _charged(load: tuple[int, int], tokens: int) -> tuple[int, int]:
    return load[0] + tokens + ROW_TOKENS, load[1] - 1


@contextmanager
def pairwise() -> Iterator[None]:
    """Cores place requests by the reference while the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "Placement", PairwisePlacement)
        yield
