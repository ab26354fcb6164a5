"""Who goes first and who gives way: pure functions over a request's standing.

Owns nothing. One `queue_key`, one `victim_key`; everything that orders requests uses them.
"""

from typing import Protocol


class Standing(Protocol):
    """What policy may look at."""

    @property
    def priority(self) -> int:
        """Higher goes first."""
        ...

    @property
    def arrival(self) -> int:
        """The core's running count of admitted requests; unique."""
        ...


def queue_key(request: Standing) -> tuple[int, int]:
    """Smallest first: by priority, then by arrival. A preempted request keeps its arrival, so it goes back ahead."""
    return (-request.priority, request.arrival)


def victim_key(request: Standing) -> tuple[int, int]:
    """Largest first: the lowest priority, then the newest. The reverse of the queue's order, so the request at the
    head of the order always keeps its pages and something always progresses."""
    return queue_key(request)


def chunk_tokens(*, remaining: int, budget: int, align: int) -> int:
    """Tokens of a prompt chunk when `remaining` positions are open and `budget` is left; 0 where none fit.

    A chunk is charged rounded up to `align`, so one that does not reach the end is a multiple of it.
    """
    if -(-remaining // align) * align <= budget:
        return remaining
    return budget // align * align
