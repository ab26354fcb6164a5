"""The credentials of peers, and the count of the frames that are dropped.

Owns the workers' key, the front ends' secret, and the table of peers that sent frames which were dropped. The first
dropped frame of a peer is logged, the next ones are counted and reported as a number every ten seconds. The table is
bounded, so peers that connect under new names again and again cost neither memory nor log lines. Reads no frame.
"""

import hmac
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("tandem.core")

_REPORT_SECONDS = 10.0
# Peers named in the log between two reports; frames of others are counted together.
_MAX_NAMED = 16


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Credentials:
    """The worker key and the front-end secret, compared in constant time, never logged or recorded."""

    worker_key: bytes
    key_path: Path
    frontend_secret: bytes

    def is_worker_key(self, key: bytes) -> bool:
        """Whether this is the key of the runtime folder, so that a Join with it is accepted."""
        return hmac.compare_digest(key, self.worker_key)

    def is_frontend_secret(self, secret: bytes) -> bool:
        """Whether this is the secret of this service, so that a Hello with it comes from a process that it started."""
        return hmac.compare_digest(secret, self.frontend_secret)

    @property
    def refusal(self) -> str:
        """The answer to a worker with a wrong key."""
        return (
            f"its key is not the one in {self.key_path}: the file was replaced after the worker read it, or the "
            "worker uses another folder; start the worker again with the scheduler's runtime_dir"
        )


class DroppedFrames:
    """Counts dropped frames per peer and logs them at a bounded rate."""

    def __init__(self) -> None:
        self.total = 0
        self._unreported: Counter[str] = Counter()
        self._others = 0
        self._report_at = 0.0

    def add(self, peer: str, reason: str) -> bool:
        """Counts one frame. Returns True if it is logged: the peer's first one since the last report."""
        self.total += 1
        if peer in self._unreported:
            self._unreported[peer] += 1
        elif len(self._unreported) < _MAX_NAMED:
            self._unreported[peer] = 0
            log.warning("%s: dropped a frame: %s", peer, reason)
            return True
        else:
            self._others += 1
        return False

    def report(self, now: float) -> None:
        """Logs every ten seconds how many more frames were dropped, and clears the table. Call it once a second."""
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_SECONDS
        more = self._unreported.total() + self._others
        if more:
            peer, count = self._unreported.most_common(1)[0]
            log.warning("dropped %d more frames in %g s; most came from %s: %d", more, _REPORT_SECONDS, peer, count)
        self._unreported.clear()
        self._others = 0
