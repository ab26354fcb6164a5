"""Checking workers that are started again when they die, as `tandem serve` and other supervisors do it.

Owns the workers of one rig and the times of their deaths. It starts nothing after `stop`.
"""

import threading
import time
from dataclasses import dataclass, field

from tests.rigs.processes import Child, Rig

_LOOK_SECONDS = 0.01


@dataclass(slots=True)
class RestartingWorkers:
    """`count` workers with these flags; each that died is replaced after `pause_seconds`."""

    rig: Rig
    flags: tuple[str, ...]
    count: int = 1
    pause_seconds: float = 0.0
    hung_seconds: float = 2.5
    """A worker that hangs is killed after this time. The scheduler must have given it up by then."""
    late: bool = True
    deaths: list[float] = field(default_factory=list[float])
    """Times of the deaths on the monotonic clock."""
    _live: list[Child] = field(default_factory=list[Child])
    _hung: dict[int, float] = field(default_factory=dict[int, float])
    _due: list[float] = field(default_factory=list[float])
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "RestartingWorkers":
        self._live = [self._start() for _ in range(self.count)]
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    @property
    def live(self) -> list[Child]:
        """Workers that were not seen dead."""
        return list(self._live)

    def _start(self) -> Child:
        return self.rig.worker(*self.flags, late=self.late)

    def _watch(self) -> None:
        self._restart_until_stopped()
        # Workers end with the thread that started them (PR_SET_PDEATHSIG), so it outlives them.
        while any(worker.exit_code is None for worker in self._live):
            time.sleep(_LOOK_SECONDS)

    def _restart_until_stopped(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            now = time.monotonic()
            for worker in [worker for worker in self._live if worker.exit_code is not None]:
                worker.killed = True
                self._live.remove(worker)
                self.deaths.append(now)
                self._due.append(now + self.pause_seconds)
            for worker in self._live:
                is_hung = any(line.startswith("hung") for line in worker.lines)
                if is_hung and now - self._hung.setdefault(worker.pid, now) > self.hung_seconds:
                    worker.kill()
            while self._due and self._due[0] <= now:
                self._due.pop(0)
                self._live.append(self._start())
