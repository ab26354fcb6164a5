"""Detects workers that crash again and again without a token in between.

The workers are in a crash loop if `DEATHS` of them died within `WINDOW_SECONDS` and no token was confirmed in between.
The service then rejects requests and reports itself as not serving, because no worker would serve them. A confirmed
token ends the crash loop. It also ends `WINDOW_SECONDS` after the first death that counts. Otherwise it could last for
ever, because a service that rejects requests computes no token.

Deaths in a trial (`suspicion/suspects.py`), where a request is looked for that kills workers, do not count. Innocent
requests get tokens between such deaths, so if `TRIAL_DEATHS` follow each other without one, the further ones count.
"""

from collections import deque

DEATHS = 5
WINDOW_SECONDS = 60.0
TRIAL_DEATHS = 5


class CrashLoop:
    """Remembers the times of the latest deaths since the last confirmed token."""

    def __init__(self) -> None:
        self._died_at: deque[float] = deque(maxlen=DEATHS)
        self._trial_deaths = 0
        self._reason = ""

    def died(self, reason: str, now: float, *, in_trial: bool = False) -> None:
        """Records that a worker which had joined is gone and did not announce its stop."""
        self._trial_deaths += in_trial
        if in_trial and self._trial_deaths <= TRIAL_DEATHS:
            return
        self._died_at.append(now)
        self._reason = reason

    def confirmed(self) -> None:
        """Records that the result of a step contained tokens, or that the request at fault was found."""
        self._trial_deaths = 0
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
