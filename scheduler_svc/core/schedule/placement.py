"""Which lane a request goes to, where several could take it: where it would get its first token soonest.

Pure functions over lanes; owns nothing. Requests wait in one queue, bound to no lane; a lane that plans leaves those to
the others that have more of their prompt kept, or less to do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.schedule.policy import WINDOW
from scheduler_svc.core.schedule.prefix_match import Beginning, beginning
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request

ROW_TOKENS = 32
"""What a row that runs delays a newcomer by, in prompt tokens."""


@dataclass(slots=True)
class Left:
    """What a rival has to do, and the rows that it has free: with what a plan has left to it so far."""

    backlog: int
    free_rows: int


def is_better_elsewhere(
    lane: Lane, request: Request, begin: Beginning, rivals: Sequence[Lane], left: dict[int, Left]
) -> bool:
    """Whether a rival that has room would start the request sooner; of equals the older lane does.

    `left` is kept here, by lane: who was left something counts as busy with it, else all that wait would be left to
    whoever is the least busy now, one plan after the other.
    """
    if not rivals:
        return False
    best, chosen, tokens = (_delay(lane, request, begin), lane.number), None, 0
    known = request.known
    for rival in rivals:
        of = left.get(rival.number)
        if of is None:
            of = left[rival.number] = Left(backlog=backlog(rival), free_rows=rival.rows.num_free)
        # At least one token is left to compute: most rivals need no closer look.
        if (of.backlog + 1, rival.number) > best or of.free_rows <= 0:
            continue
        if rival.blocked is not None or not rival.info.holds(request.total_length):
            continue
        first, num_pages = _found(rival, request)
        if rival.info.pages_at_once(known) - num_pages > rival.pool.num_unused:
            continue
        remaining = known - first
        key = (of.backlog + remaining, rival.number)
        if key < best:
            best, chosen, tokens = key, of, remaining
    if chosen is None:
        return False
    chosen.free_rows -= 1
    chosen.backlog += tokens + ROW_TOKENS
    return True


def _found(rival: Lane, request: Request) -> tuple[int, int]:
    """Where the request would begin on the rival, and how many pages it would find there.

    Remembered until the rival plans or answers: of many lanes each looks at the others once for each that waits.
    """
    key = (request.handle, request.known)
    found = rival.found.get(key)
    if found is None:
        there = beginning(rival, request)
        assert there is not None, "only siblings make a request wait"
        found = there.first_position, len(there.pages)
        if len(rival.found) >= 2 * WINDOW:
            rival.found.clear()
        rival.found[key] = found
    return found


def backlog(lane: Lane) -> int:
    """What the lane has to do, in prompt tokens."""
    rows = lane.rows
    seated = rows.seated()
    return int((rows.known[seated] - rows.planned[seated]).clip(0).sum()) + ROW_TOKENS * len(seated)


def _delay(lane: Lane, request: Request, begin: Beginning) -> int:
    """Prompt tokens that the lane computes before the request's first token."""
    return backlog(lane) + request.known - begin.first_position


def by_backlog(lanes: Iterable[Lane]) -> list[Lane]:
    """Who has least to do first."""
    ordered = list(lanes)
    return ordered if len(ordered) < 2 else sorted(ordered, key=lambda lane: (backlog(lane), lane.number))
