"""The workers of a chaos run: starts, stops, kills and replaces them.

Owns the worker processes and the workers that hang. A kill counts only if the worker has a plan of a request in flight
at that moment: the worker is stopped (SIGSTOP) first, its own counts are read while it stands still, and it is killed,
or let go on if no plan is in flight.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.requests import MAX_LENGTH, POISONS
from tests.rigs.in_flight import order_hang, read_in_flight
from tests.rigs.processes import Child, Rig
from tests.rigs.waiting import TIMEOUT_SECONDS, until

_SHAPE = (
    *("--page-size", "8", "--num-pages", "420", "--max-rows", "28", "--max-length", str(MAX_LENGTH)),
    *("--token-budget", "96", "--chunk-align", "4"),
)
_FAULTS = tuple(word for name, token in POISONS.items() for word in (f"--{name}", str(token)))
# Workers that commit a step fault of their own, which resets their lane.
_STEP_FAULT_SHARE = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    child: Child
    file: Path
    # Set while the worker hangs: the kind of hang and when it began.
    hang: str = ""
    since: float = 0.0
    was_given_up: bool = False

    @property
    def is_healthy(self) -> bool:
        return not self.hang and self.child.exit_code is None


class Fleet:
    """Keeps `size` workers; `counts` gets what happened to them."""

    def __init__(
        self, rig: Rig, rng: random.Random, size: int, step_ms: int, counts: Counter[str], clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._rig = rig
        self._rng = rng
        self._size, self._step_ms = size, step_ms
        self._counts = counts
        self._num_started = 0
        self.workers: list[Worker] = []
        self._pending: Worker | None = None
        self._leaving: Worker | None = None

    def keep_full(self) -> None:
        """Replaces workers that have died. Raises AssertionError if one died that the run had not killed."""
        for worker in list(self.workers):
            last = worker.child.lines[-1] if worker.child.lines else ""
            if not worker.hang and last.startswith("hung") and last.endswith("poisoned"):
                worker.hang, worker.since = "poisoned", self._clock()
            if worker.child.exit_code is not None:
                self._bury(worker)
        while len(self.workers) < self._size:
            self.workers.append(self._start())

    def kill_all(self) -> None:
        """Kills every worker, in any state."""
        for worker in self.workers:
            worker.child.kill()

    def stop_in_flight(self) -> Worker | None:
        """Stops a healthy worker with a plan of a request in flight. Returns None if it finds no such worker."""
        healthy = [worker for worker in self.workers if worker.is_healthy]
        self._rng.shuffle(healthy)
        for worker in healthy:
            worker.child.signal(signal.SIGSTOP)
            _wait_stopped(worker.child.pid)
            counts = read_in_flight(worker.file)
            # The first result only proves the worker.
            if counts.unanswered and counts.answered:
                return worker
            worker.child.signal(signal.SIGCONT)
        return None

    def kill_in_flight(self) -> bool:
        """Kills a worker with a plan in flight. Returns False if it finds no such worker."""
        worker = self.stop_in_flight()
        if worker is None:
            return False
        worker.child.kill()
        self.keep_full()
        return True

    def let_one_leave(self) -> bool:
        """Ends a worker by SIGTERM. Returns True once it has left; it may be killed or poisoned before."""
        worker = self._leaving
        if worker is None:
            # Until its first line a worker handles no signal.
            healthy = [worker for worker in self.workers if worker.is_healthy and worker.child.lines]
            if healthy:
                self._leaving = self._rng.choice(healthy)
                self._leaving.child.killed = True
                self._leaving.child.signal(signal.SIGTERM)
            return False
        code = worker.child.exit_code
        if code is None:
            return False
        self._leaving = None
        was_killed = code == -signal.SIGKILL or any(line.endswith("poisoned") for line in worker.child.lines)
        assert code == 0 or was_killed, f"a worker that was told to leave ended with {code}\n{worker.child.output()}"
        return code == 0

    def freeze_in_flight(self) -> bool:
        """Leaves a worker with a plan in flight stopped. Returns False if it finds no such worker."""
        worker = self.stop_in_flight()
        if worker is None:
            return False
        worker.hang, worker.since = "stopped", self._clock()
        return True

    def hang_a_step(self) -> bool:
        """Makes a worker hang in a step. Returns True once it hangs."""
        if self._pending is not None and self._pending.child.exit_code is None:
            if not any(line.startswith("hung") for line in self._pending.child.lines[-3:]):
                return False
            self._pending.hang, self._pending.since, self._pending = "hung", self._clock(), None
            return True
        candidates = [worker for worker in self.workers if worker.is_healthy and worker.file.exists()]
        self._pending = self._rng.choice(candidates) if candidates else None
        if self._pending is not None:
            order_hang(self._pending.file)
        return False

    def hung(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.hang and not worker.was_given_up]

    def settle_hung(self, pids: Collection[int], *, counts: bool) -> list[str]:
        """Counts hung workers that the service has given up; `pids` are those that it uses.

        Without `counts` the scheduler that knew them is dead; then the hangs do not count, and are returned.
        """
        uncounted: list[str] = []
        for worker in self.hung():
            if worker.child.pid in pids and worker.child.exit_code is None:
                waited = self._clock() - worker.since
                assert waited < TIMEOUT_SECONDS, f"a {worker.hang} worker was not given up in {waited:.0f} s"
            else:
                if not counts and worker.hang != "poisoned":
                    uncounted.append(worker.hang)
                self._given_up(worker, counts=counts)
        return uncounted

    def _given_up(self, worker: Worker, *, counts: bool = True) -> None:
        worker.was_given_up = True
        self._counts["hangs"] += counts and worker.hang != "poisoned"
        self._counts[f"{worker.hang} workers given up"] += 1
        if worker.child.exit_code is not None:
            self._counts["hung workers killed by the service"] += 1
        elif worker.hang == "stopped" and self._rng.random() < 0.5:
            worker.child.signal(signal.SIGCONT)
            worker.hang, worker.was_given_up = "", False
            self._counts["stopped workers that went on"] += 1
        else:
            worker.child.kill()

    def _start(self) -> Worker:
        self._num_started += 1
        flags = [*_SHAPE, *_FAULTS, "--step-ms", str(self._step_ms)]
        if self._rng.random() < _STEP_FAULT_SHARE:
            fault = self._rng.choice(["--oom-steps", "--out-of-sync-steps", "--fail-steps"])
            flags += [fault, str(self._rng.randrange(20, 200))]
        file = self._rig.runtime_dir / f"in-flight-{self._num_started}"
        child = self._rig.worker(*flags, "--in-flight-file", str(file), seed=self._rng.randrange(1 << 30))
        self._counts["workers started"] += 1
        return Worker(child=child, file=file)

    def _bury(self, worker: Worker) -> None:
        """Checks how a worker ended, and forgets it: ten thousand of them need not be remembered."""
        child = worker.child
        child.join_output()
        output = child.output()
        assert "Traceback" not in output, output
        if any(line.startswith("exited") and line.endswith("poisoned") for line in child.lines):
            self._counts["workers killed by poison"] += 1
        elif not child.killed and not worker.hang:
            assert child.exit_code == -signal.SIGKILL, (
                f"a worker ended by itself, exit code {child.exit_code}\n{output}"
            )
            # The machine may be so busy that a healthy worker stands still for seconds.
            self._counts["workers killed by the service that did not hang"] += 1
        if worker.hang and not worker.was_given_up:
            self._given_up(worker)
        self.workers.remove(worker)
        if worker is self._pending:
            self._pending = None
        worker.file.unlink(missing_ok=True)
        child.killed = True
        self._rig.children.remove(child)


def _wait_stopped(pid: int) -> None:
    """Waits until a signal has stopped the process, or it has ended."""

    def has_stopped() -> bool:
        try:
            return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    until(has_stopped, f"the stop of process {pid}")
