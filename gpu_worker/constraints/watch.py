"""The limits of constraints, and how long the mask server has computed the same thing.

Limits are in CPU time of the thread that computes; wall time only ends what sleeps. Owns the time, and its words in a
refusal; what is computed is in the shared memory (`frames.py`). Wall time counts only while a caller waits, so a pause
of this process, or of the machine, replaces no server.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.constraints.frames import PREPARED, WORK, SharedArea, Stage, Work
from tandem_contract.fork_server import cpu_seconds
from tandem_contract.grammars import COMPILE_SECONDS, MASK_SECONDS, START_SECONDS, limit_words, shown

# The longest wait between two looks; more of the time between them was not spent waiting.
SLICE_SECONDS, _MOST_SECONDS = 0.02, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a mask server may take, in seconds."""

    # CPU time of one mask, and of the tokens that the row takes before it.
    mask: float = MASK_SECONDS
    # CPU time of a constraint: compiling it, and its first mask.
    prepare: float = COMPILE_SECONDS
    # The same for one that was within the limit before, while rows wait for it.
    define: float = 4.0
    # Wall time, as a multiple of each of these limits: a server that does not get so little CPU time is replaced.
    patience: float = 10.0
    # Wall time of a server that rows wait for and that computes nothing.
    idle: float = 5.0
    # Wall time of the start of the process.
    start: float = START_SECONDS


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that was exceeded. Times in seconds."""

    cpu: float
    wall: float
    limit: float
    # By what the limit was multiplied, because this machine is slower than the reference.
    slowness: float

    @property
    def is_of_cpu(self) -> bool:
        """Whether it was CPU time. Otherwise the thread slept, or the machine was busy."""
        return self.cpu > self.limit * self.slowness

    @property
    def words(self) -> str:
        """What was measured, and the limit."""
        took = f"took {shown(self.cpu)} of CPU time"
        if not self.is_of_cpu:
            took += f" in {shown(self.wall)} and was not done, because the machine is busy"
        return f"{took}; {limit_words(self.limit, self.slowness)}"


@dataclass(slots=True)
class _Task:
    """One word of a thread: seconds that a caller waited, the last look by the clock, CPU time at the word's begin."""

    word: int = -1
    waited: float = 0.0
    last_look: float = 0.0
    # Read only of what takes longer than a slice, because most masks do not.
    cpu_begun: float | None = None


class Watch:
    """The time of one serving process; `restart` begins the next.

    What is answered comes from one word of the shared memory, read once: the server may write the next one meanwhile.
    """

    def __init__(
        self,
        area: SharedArea,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[int, int], float] = cpu_seconds,
    ) -> None:
        """clock: seconds that never go back. cpu: those of a thread, by its process and its own number."""
        self._progress, self._limits, self._clock, self._cpu = area.progress, limits, clock, cpu
        self.restart()

    def restart(self) -> None:
        """Another process follows, which has not said yet that it serves."""
        self._process = self._preparing_thread = 0
        self._slowness = 1.0
        self._work, self._preparation = _Task(), _Task()
        self._begun = self._clock()

    def begin(self, process: int, preparing_thread: int, slowness: float) -> None:
        """The process says that it serves. slowness: that of its machine."""
        self._process, self._preparing_thread, self._slowness = process, preparing_thread, slowness

    @property
    def work(self) -> Work:
        return Work.of(int(self._progress[WORK])) if self._process else Work(Stage.IDLE, 0)

    @property
    def prepared(self) -> int:
        """The id of the constraint that is prepared, 0 for none."""
        return int(self._progress[PREPARED]) if self._process else 0

    def overdue_work(self) -> tuple[Work, Excess] | None:
        """For a worker that waits for rows, and looks again and again: what exceeds its limit."""
        if not self._process:
            return None
        word, limits = int(self._progress[WORK]), self._limits
        work = Work.of(word)
        if work.stage is Stage.IDLE:
            waited = self._waited(self._work, word)
            excess = Excess(cpu=0.0, wall=waited, limit=limits.idle, slowness=self._slowness)
            return (work, excess) if waited > limits.idle else None
        limit = limits.define if work.stage is Stage.DEFINE else limits.mask
        excess = self._excess(self._work, word, self._process, limit)
        return None if excess is None else (work, excess)

    def overdue_preparation(self) -> tuple[int, Excess] | None:
        """The id of the constraint that is prepared and exceeds its limit."""
        if not (prepared := self.prepared):
            self._preparation = _Task()
            return None
        excess = self._excess(self._preparation, prepared, self._preparing_thread, self._limits.prepare)
        return None if excess is None else (prepared, excess)

    def _waited(self, task: _Task, word: int) -> float:
        """The seconds that a caller has waited for the same word, by the wall. The begin of another one is now."""
        now = self._clock()
        passed, task.last_look = now - task.last_look, now
        if task.word != word:
            task.word, task.waited, task.cpu_begun = word, 0.0, None
        else:
            task.waited += min(passed, _MOST_SECONDS)
        return task.waited

    def _excess(self, task: _Task, word: int, thread: int, limit: float) -> Excess | None:
        waited = self._waited(task, word)
        if waited < SLICE_SECONDS:
            return None
        used = self._cpu(self._process, thread)
        if task.cpu_begun is None:
            task.cpu_begun = used
        excess = Excess(cpu=used - task.cpu_begun, wall=waited, limit=limit, slowness=self._slowness)
        return excess if excess.is_of_cpu or waited > self._limits.patience * limit * self._slowness else None

    def start_overran(self) -> bool:
        """Whether the process should have said by now that it serves."""
        return not self._process and self._clock() - self._begun > self._limits.start
