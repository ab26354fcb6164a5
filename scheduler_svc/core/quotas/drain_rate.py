"""How fast requests leave the queue, so that a refused caller learns when to try again. Callers pass the time."""

from collections import deque

_RECENT = 64
LEAST_SECONDS, MOST_SECONDS = 0.5, 60.0
"""Bounds of an estimate. The least one is also the answer before anything was measured."""


class DrainRate:
    """The last requests that got their first row: their times and prompt tokens."""

    def __init__(self) -> None:
        self._started: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._tokens = 0

    def record(self, now: float, tokens: int) -> None:
        """Counts a request that left the queue."""
        if len(self._started) == _RECENT:
            self._tokens -= self._started[0][1]
        self._started.append((now, tokens))
        self._tokens += tokens

    def seconds(self, requests: int, tokens: int, now: float) -> float:
        """Returns in how many seconds that many requests and tokens will have left the queue, within the bounds."""
        if not self._started:
            return LEAST_SECONDS
        elapsed = now - self._started[0][0]
        estimate = max(requests / len(self._started), tokens / max(1, self._tokens)) * elapsed
        return min(max(estimate, LEAST_SECONDS), MOST_SECONDS)
