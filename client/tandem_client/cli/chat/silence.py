"""The pauses of an answer: what a person who waits is told, while the service is silent and when it goes on.

Takes times as arguments, in seconds of one clock. Does no I/O.
"""

from tandem_client.plural import counted
from tandem_client.types import Load

# A shorter pause is not worth a word.
QUIET_SECONDS = 1.0
# Between the service's clock and this one: GetLoad's answer is on its way for a moment.
_ROUNDING_SECONDS = 0.3


class Silence:
    """The time since the answer's last part, and what is known of its cause."""

    def __init__(self, now: float) -> None:
        self._since = now
        # Parts of the answer that have come.
        self.num_parts = 0
        self._requests_ahead = 0
        # The service's own words since the last part.
        self._reason = ""
        # The cause in words, and whether the loss of a worker explains the pause; the connection's, too.
        self._cause = ""
        self._is_loss = False
        self._lost_connection = False

    def accepted(self, requests_ahead: int) -> None:
        """The service has accepted the request."""
        self._requests_ahead = requests_ahead

    def waits(self, message: str, *, is_loss: bool) -> None:
        """The service has said why the request makes no progress; `is_loss`: its worker was lost."""
        self._reason, self._is_loss = message, self._is_loss or is_loss

    def looked(self, load: Load, now: float) -> None:
        """The service has answered GetLoad."""
        lost = load.worker_lost_seconds
        # A worker that was lost before the last part has not caused this pause.
        self._is_loss |= lost is not None and now - lost >= self._since - _ROUNDING_SECONDS
        if self._is_loss:
            reason = f": {load.worker_lost_reason}" if load.worker_lost_reason else ""
            self._cause = f"worker lost{reason}; the answer goes on when another worker has it"
        else:
            self._cause = load.not_serving

    def unreachable(self, reason: str) -> None:
        """The service has not answered GetLoad."""
        self._lost_connection, self._reason = True, ""
        self._cause = f"connection lost ({reason}); trying again"

    def part(self, now: float) -> str:
        """A part of the answer has come. Returns what is worth telling of the pause before it; empty if nothing is."""
        seconds = now - self._since
        what = "worker lost" if self._is_loss else "connection lost" if self._lost_connection else ""
        told = f"{what}, resumed after {seconds:.1f} s" if what else ""
        self._since, self.num_parts = now, self.num_parts + 1
        self._reason, self._cause, self._is_loss, self._lost_connection = "", "", False, False
        return told

    def seconds(self, now: float) -> float:
        """The time since the last part."""
        return now - self._since

    def status(self, now: float) -> str:
        """The line below the answer; empty while it comes without a pause."""
        seconds = now - self._since
        if seconds < QUIET_SECONDS:
            return ""
        if cause := self._reason or self._cause:
            return f"{cause} ({seconds:.0f} s)"
        if not self.num_parts and self._requests_ahead:
            return f"waiting behind {counted(self._requests_ahead, 'request')} ({seconds:.0f} s)"
        return f"waiting ({seconds:.0f} s)"
