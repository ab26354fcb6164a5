"""Whether the workers die again and again without computing anything.

Owns the times of the latest deaths since the last confirmed token. A service whose workers crash in a loop says so in
its health instead of accepting requests that wait for nothing. The state ends with a confirmed token, or by time: once
fewer than `DEATHS` lie within `WINDOW_SECONDS`, so that an idle service whose worker stays up serves again.
"""

from collections import deque

DEATHS = 5
WINDOW_SECONDS = 60.0


class CrashLoop:
    """Fed with every death of a worker and every step that confirmed tokens."""

    def __init__(self) -> None:
        self._died_at: deque[float] = deque(maxlen=DEATHS)
        self._reason = ""

    def died(self, reason: str, now: float) -> None:
        """A worker that had joined is gone and did not say goodbye."""
        self._died_at.append(now)
        self._reason = reason

    def confirmed(self) -> None:
        """A step brought tokens."""
        if self._died_at:
            self._died_at.clear()

    def cause(self, now: float) -> str:
        """One sentence while the loop lasts, else empty."""
        if len(self._died_at) < DEATHS or now - self._died_at[0] > WINDOW_SECONDS:
            return ""
        return (
            f"workers crash in a loop: {DEATHS} died within {WINDOW_SECONDS:g} s and no token was computed in between; "
            f"the last one: {self._reason}; "
            f"this ends with the next token, or {WINDOW_SECONDS:g} s after the first death"
        )
