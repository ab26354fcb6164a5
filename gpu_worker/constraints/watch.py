"""How long the mask server has computed the same thing, by the worker's clock.

Owns the time; what is computed is in the shared memory (`area.py`). A pause of this process, or of the machine, does
not count, so it fails no row.
"""

import time

from gpu_worker.constraints.area import (
    COUNT,
    IDLE,
    LIMIT_US,
    OF_CONSTRAINT,
    PREPARE_COUNT,
    PREPARED,
    SUBJECT,
    TOKEN,
    SharedArea,
)
from gpu_worker.constraints.limits import PREPARE_SECONDS, START_SECONDS

# The longest wait between two looks. A longer time between them was not spent waiting.
SLICE_SECONDS, _MOST_SECONDS = 0.02, 0.05
# A server with a request that shows no progress is stopped, or has lost it.
_IDLE_SECONDS = 2.0


class Watch:
    """The time of one serving process; `restart` begins the next."""

    def __init__(self, area: SharedArea) -> None:
        self._progress = area.progress
        self.restart()

    def restart(self) -> None:
        """Another process follows, which has not said yet that it serves."""
        self.is_serving = False
        self._count, self._seconds = -1, 0.0
        self._prepare_count = -1
        self._begun = self._last_look = self._prepare_begun = time.monotonic()

    @property
    def row(self) -> int:
        """The row whose tokens or mask are computed; 0 if it is none."""
        return max(0, int(self._progress[SUBJECT])) if self.is_serving else 0

    @property
    def token(self) -> int:
        """The number of the output token that this is for, from 1 on."""
        return int(self._progress[TOKEN])

    @property
    def defined(self) -> int | None:
        """The id of the constraint that rows wait for."""
        subject = int(self._progress[SUBJECT])
        return OF_CONSTRAINT - subject if self.is_serving and subject <= OF_CONSTRAINT else None

    @property
    def prepared(self) -> int | None:
        """The id of the constraint that is prepared."""
        found = int(self._progress[PREPARED])
        return found if self.is_serving and found >= 0 else None

    def overran(self) -> bool:
        """For a worker that waits for rows, and looks again and again. Returns whether a limit is exceeded."""
        now = time.monotonic()
        passed, self._last_look = now - self._last_look, now
        if not self.is_serving:
            return False
        count, subject = int(self._progress[COUNT]), int(self._progress[SUBJECT])
        if count != self._count:
            self._count, self._seconds = count, 0.0
            return False
        self._seconds += passed if passed < _MOST_SECONDS else 0.0
        limit = _IDLE_SECONDS if subject == IDLE else int(self._progress[LIMIT_US]) / 1e6
        return self._seconds > limit and int(self._progress[COUNT]) == count

    def preparing_overran(self) -> bool:
        """Whether the limit of the constraint that is prepared is exceeded."""
        now, count = time.monotonic(), int(self._progress[PREPARE_COUNT])
        if count != self._prepare_count or self.prepared is None:
            self._prepare_count, self._prepare_begun = count, now
            return False
        return now - self._prepare_begun > PREPARE_SECONDS

    def start_overran(self) -> bool:
        """Whether the process should have said by now that it serves."""
        return not self.is_serving and time.monotonic() - self._begun > START_SECONDS
