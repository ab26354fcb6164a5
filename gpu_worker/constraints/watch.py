"""How long the mask server has computed the same thing, by the worker's clock.

Owns the time; what is computed is in the shared memory (`area.py`). A pause of this process, or of the machine, does
not count, so it fails no row.
"""

import time

from gpu_worker.constraints.area import (
    COUNT,
    IDLE,
    OF_CONSTRAINT,
    PREPARE_COUNT,
    PREPARED,
    SUBJECT,
    TOKEN,
    SharedArea,
)
from gpu_worker.constraints.limits import Limits

# The longest wait between two looks. A longer time between them was not spent waiting.
SLICE_SECONDS, _MOST_SECONDS = 0.02, 0.05
# CPUCLOCK_SCHED of Linux.
_CPU_CLOCK = 2


class Watch:
    """The time of one serving process; `restart` begins the next."""

    def __init__(self, area: SharedArea, limits: Limits) -> None:
        self._progress, self._limits = area.progress, limits
        self.restart()

    def restart(self) -> None:
        """Another process follows, which has not said yet that it serves."""
        self.is_serving = False
        self._process = 0
        self._count, self._seconds, self._cpu_begun = -1, 0.0, 0.0
        self._prepare_count = -1
        self._begun = self._last_look = self._prepare_begun = time.monotonic()

    def begin(self, process: int) -> None:
        """The process says that it serves."""
        self.is_serving, self._process = True, process

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
            self._count, self._seconds, self._cpu_begun = count, 0.0, self._cpu_seconds()
            return False
        self._seconds += passed if passed < _MOST_SECONDS else 0.0
        limits = self._limits
        limit = limits.idle if subject == IDLE else limits.mask if subject > 0 else limits.define
        return self._seconds > limit and int(self._progress[COUNT]) == count

    @property
    def has_computed(self) -> bool:
        """Whether the server has used the CPU for half of that time. Otherwise it was stopped, or got no CPU."""
        return self._cpu_seconds() - self._cpu_begun > self._seconds / 2

    def _cpu_seconds(self) -> float:
        try:
            # clock_getcpuclockid(3): the clock of a process.
            return time.clock_gettime((~self._process << 3) | _CPU_CLOCK)
        except OSError:
            return 0.0

    def preparing_overran(self) -> bool:
        """Whether the limit of the constraint that is prepared is exceeded."""
        now, count = time.monotonic(), int(self._progress[PREPARE_COUNT])
        if count != self._prepare_count or self.prepared is None:
            self._prepare_count, self._prepare_begun = count, now
            return False
        return now - self._prepare_begun > self._limits.prepare

    def start_overran(self) -> bool:
        """Whether the process should have said by now that it serves."""
        return not self.is_serving and time.monotonic() - self._begun > self._limits.start
