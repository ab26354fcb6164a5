"""Who may speak to the core, and the count of the frames that are dropped.

Owns the workers' key, the front ends' secret, and the table of peers that sent frames which were dropped: the first is
logged, those that follow are counted and reported as a number every ten seconds. The table is bounded, so peers that
connect under ever new names cost neither memory nor log lines. Reads no frame.
"""

import hmac
import logging
from collections import Counter
from pathlib import Path

log = logging.getLogger("tandem.core")

_REPORT_SECONDS = 10.0
# Peers named in the log between two reports; frames of others are counted together.
_MAX_NAMED = 16


class Credentials:
    """What workers and front ends prove themselves with; compared in constant time, never logged or recorded."""

    def __init__(self, *, worker_key: bytes, key_path: Path, frontend_secret: bytes) -> None:
        self._worker_key = worker_key
        self._key_path = key_path
        self._frontend_secret = frontend_secret

    def admit_worker(self, key: bytes) -> bool:
        """Whether a Join with this key belongs to the runtime folder."""
        return hmac.compare_digest(key, self._worker_key)

    def admit_frontend(self, secret: bytes) -> bool:
        """Whether a Hello with this secret comes from a process that this service started."""
        return hmac.compare_digest(secret, self._frontend_secret)

    @property
    def refusal(self) -> str:
        """What a worker with another key is answered."""
        return (
            f"its key is not the one in {self._key_path}: the file was replaced after the worker read it, or the "
            "worker uses another folder; start the worker again with the scheduler's runtime_dir"
        )


class DroppedFrames:
    """Counts what was dropped, per peer, and says so at a bounded rate."""

    def __init__(self) -> None:
        self.total = 0
        self._unreported: Counter[str] = Counter()
        self._others = 0
        self._report_at = 0.0

    def add(self, peer: str, reason: str) -> bool:
        """Counts one frame. True for the peer's first one since the last report, which is logged with its reason."""
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
        """Called at least once a second: every ten seconds logs how many more were dropped, and forgets the peers."""
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_SECONDS
        more = self._unreported.total() + self._others
        if more:
            peer, count = self._unreported.most_common(1)[0]
            log.warning("dropped %d more frames in %g s; most came from %s: %d", more, _REPORT_SECONDS, peer, count)
        self._unreported.clear()
        self._others = 0
