"""Keeps one worker's process running on a node: starts it, reads its output, starts it again, ends it.

Owns the process and what is reported of it. Knows nothing of Ray: the actor that holds a supervisor is a process of
Ray, and the worker ends with it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

import gpu_worker
from gpu_worker.cluster.fleet import Fleet
from gpu_worker.cluster.reports import Report, State
from gpu_worker.cluster.restarts import GiveUp, Restarts
from tandem_contract.log_lines import last_line, may_have_cause

_KEPT_LINES, _MAX_LINE = 20, 500
# The time for the last output after a worker has ended.
_LAST_OUTPUT_SECONDS = 1.0
# What a worker logs when the scheduler has admitted it.
_JOINED = "joined the scheduler"
_FOLDER = Path(gpu_worker.__file__).parents[1]


class Supervisor:
    """One worker that is started again until `stop`, or until `Restarts` gives up."""

    def __init__(self, fleet: Fleet, *, number: int = 0, output: TextIO | None = None) -> None:
        """output: where the worker's lines go, with its number; default: stderr."""
        self._command = fleet.command(sys.executable)
        self._number, self._output = number, output or sys.stderr
        self._max_failures = fleet.max_failures
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._state, self._since, self._cause = State.STARTING, time.monotonic(), ""
        self._joined_at: float | None = None
        self._num_starts = 0
        self._stopping = False
        self._start_thread()

    def _start_thread(self) -> None:
        # The kernel ends the worker with the thread that started it, so this thread lives as long as the supervisor.
        self._restarts = Restarts(max_failures=self._max_failures)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """The worker as it is now."""
        with self._changed:
            return Report(
                number=self._number,
                state=self._state,
                host=socket.gethostname(),
                pid=self._process.pid if self._process is not None and self._process.poll() is None else 0,
                num_starts=self._num_starts,
                seconds=time.monotonic() - self._since,
                cause=self._cause,
                last_line=self._lines[-1] if self._lines else "",
            )

    def retry(self) -> bool:
        """Starts a worker that was given up. Returns whether it was."""
        with self._changed:
            if self._stopping or self._state != State.GIVEN_UP:
                return False
            self._enter(State.STARTING)
        self._thread.join()
        self._start_thread()
        return True

    def stop(self, grace_seconds: float) -> None:
        """Ends the worker: SIGTERM, on which its requests move to other workers, and SIGKILL after the grace."""
        with self._changed:
            self._stopping = True
            self._signal(signal.SIGTERM)
            self._changed.notify_all()
        self._thread.join(grace_seconds)
        if self._thread.is_alive():
            with self._changed:
                self._signal(signal.SIGKILL)
            self._thread.join()
        with self._changed:
            self._enter(State.STOPPED)

    def _signal(self, number: signal.Signals) -> None:
        """Signals the process; SIGKILL also reaches the processes that it started."""
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _run(self) -> None:
        while True:
            status = self._run_once()
            with self._changed:
                if self._stopping:
                    return
                served = time.monotonic() - self._joined_at if self._joined_at is not None else 0.0
                decision = self._restarts.decide(status=status, served_seconds=served)
                self._cause = self._ending(status)
                if isinstance(decision, GiveUp):
                    self._cause = f"{decision.why}: {self._cause}"
                    self._enter(State.GIVEN_UP)
                    return
                self._enter(State.PAUSED)
                if self._changed.wait_for(lambda: self._stopping, decision):
                    return

    def _run_once(self) -> int:
        """Runs the worker until it ends. Returns its exit status."""
        with self._changed:
            if self._stopping:
                return 0
            self._joined_at = None
            self._lines.clear()
            self._num_starts += 1
            self._enter(State.STARTING)
            try:
                self._process = process = self._start()
            except OSError as error:
                self._lines.append(f"the process cannot be started: {error}")
                return 1
        reader = threading.Thread(target=self._read, args=(process,), name="reader", daemon=True)
        reader.start()
        status = process.wait()
        # What it started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(_LAST_OUTPUT_SECONDS)
        return status

    def _start(self) -> "subprocess.Popen[str]":
        paths = [str(_FOLDER), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu_worker.cluster.leash", str(os.getpid()), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._take(line.rstrip()[:_MAX_LINE])

    def _take(self, line: str) -> None:
        if not line:
            return
        with contextlib.suppress(OSError, ValueError):
            print(f"worker {self._number}: {line}", file=self._output, flush=True)
        if not may_have_cause(line):
            return
        with self._changed:
            self._lines.append(line)
            if _JOINED in line:
                self._joined_at = time.monotonic()
                self._enter(State.SERVING)

    def _enter(self, state: State) -> None:
        """Changes the state. The caller holds the lock."""
        if state != self._state:
            self._state, self._since = state, time.monotonic()

    def _ending(self, status: int) -> str:
        """How the worker ended, with its own last line."""
        ended = f"killed by {_name_of(-status)}" if status < 0 else f"exit code {status}"
        return f"{ended}: {last_line(self._lines)}"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
