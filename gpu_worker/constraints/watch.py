"""How long the mask server has computed the same thing, by the worker's clock.

Owns the time; what is computed is in the shared memory (`area.py`). A pause of this process, or of the machine, does
not count, so it fails no row.
"""

import time
from collections.abc import Callable

from gpu_worker.constraints.area import PREPARED, WORK, SharedArea, Stage, Work
from gpu_worker.constraints.limits import Limits

# The longest wait between two looks. A longer time between them was not spent waiting.
SLICE_SECONDS, _MOST_SECONDS = 0.02, 0.05
# CPUCLOCK_SCHED of Linux.
_CPU_CLOCK = 2


class Watch:
    """The time of one serving process; `restart` begins the next.

    What is answered comes from one word of the shared memory, read once: the server may write the next one meanwhile.
    """

    def __init__(self, area: SharedArea, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never go back."""
        self._progress, self._limits, self._clock = area.progress, limits, clock
        self.restart()

    def restart(self) -> None:
        """Another process follows, which has not said yet that it serves."""
        self.is_serving = False
        self._process = 0
        self._word, self._seconds, self._cpu_begun = -1, 0.0, 0.0
        self._prepared = 0
        self._begun = self._last_look = self._prepare_begun = self._clock()

    def begin(self, process: int) -> None:
        """The process says that it serves."""
        self.is_serving, self._process = True, process

    @property
    def work(self) -> Work:
        """What the server does."""
        return Work.of(int(self._progress[WORK])) if self.is_serving else Work(Stage.IDLE, 0)

    @property
    def prepared(self) -> int:
        """The id of the constraint that is prepared, 0 for none."""
        return int(self._progress[PREPARED]) if self.is_serving else 0

    def overdue_work(self) -> Work | None:
        """For a worker that waits for rows, and looks again and again: what exceeds its limit."""
        now = self._clock()
        passed, self._last_look = now - self._last_look, now
        if not self.is_serving:
            return None
        word = int(self._progress[WORK])
        if word != self._word:
            self._word, self._seconds, self._cpu_begun = word, 0.0, self._cpu_seconds()
            return None
        self._seconds += passed if passed < _MOST_SECONDS else 0.0
        work, limits = Work.of(word), self._limits
        limit = {Stage.IDLE: limits.idle, Stage.DEFINE: limits.define}.get(work.stage, limits.mask)
        return work if self._seconds > limit else None

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

    def overdue_preparation(self) -> int:
        """The id of the constraint that is prepared and exceeds the limit, 0 for none."""
        now, prepared = self._clock(), self.prepared
        if prepared != self._prepared or not prepared:
            self._prepared, self._prepare_begun = prepared, now
            return 0
        return prepared if now - self._prepare_begun > self._limits.prepare else 0

    def start_overran(self) -> bool:
        """Whether the process should have said by now that it serves."""
        return not self.is_serving and self._clock() - self._begun > self._limits.start
