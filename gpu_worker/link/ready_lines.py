"""The lines that say, at every log level, that this worker can compute: it serves, or it is ready on standby.

Owns their text and when each is logged. `tandem serve` reads them.
"""

import logging

from tandem_contract.logs import announce

log = logging.getLogger(__name__)

# The address that clients use by default.
_DEFAULT_LISTEN = "127.0.0.1:50051"
_STANDBY_LINE = "on standby: ready to take over"


def ready_line(listen: str) -> str:
    """The log line with a command to paste once the service at `listen` is ready."""
    address = "" if listen == _DEFAULT_LISTEN else f" --address {listen}"
    return f'ready: tandem generate{address} "Return the"'


class ReadyLines:
    """Logs a line after the first step that succeeds since the worker joined or was seated."""

    def __init__(self, remote: str = "") -> None:
        """remote: the endpoint of a scheduler on another host, which says no address for callers of this host."""
        self._remote = remote
        self._listen = ""
        # Logged after the next step that succeeds; empty if it was logged already.
        self._line = ""

    def joined(self, listen: str, *, on_standby: bool) -> None:
        """A session begins. `listen` is the address of the service; without one no line is due, except on standby."""
        self._listen = listen
        self._line = _STANDBY_LINE if on_standby else self._serving_line()

    def seated(self) -> None:
        """The worker gets requests from now on."""
        log.info("no longer on standby: this worker serves now")
        self._line = self._serving_line()

    def session_ended(self) -> None:
        """Forgets the line that was due."""
        self._line = ""

    def step_succeeded(self) -> None:
        """Logs the line that is due."""
        if self._line:
            announce("%s", self._line)
            self._line = ""

    def _serving_line(self) -> str:
        if self._remote:
            return f"ready: this worker serves the scheduler at {self._remote}"
        return ready_line(self._listen) if self._listen else ""
