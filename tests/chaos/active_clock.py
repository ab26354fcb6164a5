"""A clock that stands still while this process does, so that a frozen machine breaks no time limit."""

import time

_LONGEST_TURN_SECONDS = 0.5


class ActiveClock:
    """Call it often: at most half a second passes between two calls."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._now = 0.0

    def __call__(self) -> float:
        """The seconds since the start in which this process ran."""
        seen = time.monotonic()
        self._now += min(seen - self._seen, _LONGEST_TURN_SECONDS)
        self._seen = seen
        return self._now
