"""Detects workers that crash again and again without a token in between.

The workers are in a crash loop if `DEATHS` of them died within `WINDOW_SECONDS` and no token was confirmed in between.
The service then rejects requests and reports itself as not serving, because no worker would serve them. A confirmed
token ends the crash loop. It also ends `WINDOW_SECONDS` after the first death that counts. Otherwise it could last for
ever, because a service that rejects requests computes no token.
"""

from collections import deque

DEATHS = 5
WINDOW_SECONDS = 60.0


class CrashLoop:
    """Remembers the times of the latest deaths since the last confirmed token."""

    def __init__(self) -> None:
        self._died_at: deque[float] = deque(maxlen=DEATHS)
        self._reason = ""

    def died(self, reason: str, now: float) -> None:
        """Records that a worker which had joined is gone and did not announce its stop."""
        self._died_at.append(now)
        self._reason = reason

    def confirmed(self) -> None:
        """Records that the result of a step contained tokens."""
        if self._died_at:
            self._died_at.clear()

    def cause(self, now: float) -> str:
        """Returns one sentence if the workers are in a crash loop, otherwise an empty string."""
        if len(self._died_at) < DEATHS or now - self._died_at[0] > WINDOW_SECONDS:
            return ""
        return (
            f"workers crash in a loop: {DEATHS} died within {WINDOW_SECONDS:g} s and no token was computed in between; "
            f"the last one: {self._reason}; "
            f"requests are accepted again after the next token, or {WINDOW_SECONDS:g} s after the first of these deaths"
        )
