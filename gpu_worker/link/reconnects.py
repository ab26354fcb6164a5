"""How often, and how soon, the worker connects again. Owns the count of connections that came to nothing."""

import logging

from tandem_contract.logs import is_worth_a_line

log = logging.getLogger(__name__)

# Pauses between connections that ended before a step succeeded on them.
FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.02, 2.0


class Reconnects:
    """Connections that ended since a step succeeded: each costs a pause, and few of them a log line."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._num_ended = 0

    def step_succeeded(self) -> None:
        """Forgets the connections that ended before."""
        self._num_ended = 0

    def ended(self, why: str) -> float:
        """Notes that a connection ended; `why` is empty if it was lost. Returns the seconds before the next one."""
        self._num_ended += 1
        if is_worth_a_line(self._num_ended):
            times = f" {self._num_ended} times before a step succeeded" if self._num_ended > 1 else ""
            cause = f": {why}" if why else ""
            log.warning(
                "the connection to the scheduler ended%s%s; waiting for a scheduler at %s", times, cause, self._endpoint
            )
        if self._num_ended == 1:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_ended, 16), _LAST_PAUSE_SECONDS)
