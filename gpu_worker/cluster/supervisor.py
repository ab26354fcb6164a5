"""Keeps one worker's process running on a node, and reports it.

Knows nothing of Ray: the actor that holds a supervisor is a process of Ray, and the worker ends with it.
"""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import gpu_worker
from gpu_worker.cluster.fleet import Fleet
from gpu_worker.cluster.reports import Report, State
from tandem_contract import processes
from tandem_contract.child import Program, signal_name
from tandem_contract.logs import may_have_cause
from tandem_contract.processes import Ended, GiveUp, Heard, Policy, run

_MAX_LINE = 500
# What a worker logs when the scheduler has admitted it.
_JOINED = "joined the scheduler"
_FOLDER = Path(gpu_worker.__file__).parents[1]


def policy(max_failures: int) -> Policy:
    """That of a worker: one that served for a minute was no failure of its settings, its model or its machine."""
    return Policy(
        first_pause_seconds=0.1, steady_seconds=60.0, steady_at_once=False, needs_service=False,
        each_alone=True, max_ends=max_failures, window_seconds=math.inf,
    )  # fmt: skip


class Supervisor:
    """One worker that is started again until `stop`, or until it is given up."""

    def __init__(self, fleet: Fleet, *, number: int = 0, output: TextIO | None = None) -> None:
        """output: where the worker's lines go, with its number; default: stderr."""
        self._output, self._max_failures = output or sys.stderr, fleet.max_failures
        self._last_line = ""
        # Replaced as a whole, so that other threads may read it; and since when it is so.
        self._known = Report(number=number, state=State.STARTING, host=socket.gethostname()), time.monotonic()
        paths = [str(_FOLDER), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        program = Program(argv=tuple(fleet.command(sys.executable)), environment=environment)
        self._process = processes.Supervisor(
            f"worker {number}", lambda: program, policy(fleet.max_failures), hear=self._hear, on_change=self._note
        )
        # The kernel ends the worker with the thread that started it, so this thread lives as long as the supervisor.
        self._thread = threading.Thread(target=run, args=(self._process,), name="supervisor", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """The worker as it is now."""
        known, since = self._known
        return replace(known, seconds=time.monotonic() - since, last_line=self._last_line)

    def retry(self) -> bool:
        """Starts a worker that was given up. Returns whether it was."""
        return self._process.retry()

    def stop(self, grace_seconds: float) -> None:
        """Ends the worker: SIGTERM, on which its requests move to other workers, and SIGKILL after the grace."""
        self._process.stop(grace_seconds)
        self._thread.join()

    def _hear(self, line: str) -> Heard:
        line = line[:_MAX_LINE]
        if line:
            with contextlib.suppress(OSError, ValueError):
                print(f"{self._process.name}: {line}", file=self._output, flush=True)
        if may_have_cause(line):
            self._last_line = line
        return Heard.SERVES if _JOINED in line else Heard.WORDS

    def _note(self, process: processes.Supervisor) -> None:
        if process.state == processes.State.STARTING:
            self._last_line = ""
        known, _ = self._known
        state, cause = State(process.state.value), known.cause
        if state in (State.PAUSED, State.GIVEN_UP) and process.ended is not None:
            cause = self._cause(process.ended)
        known = replace(known, state=state, pid=process.pid, num_starts=process.num_starts, cause=cause)
        self._known = known, process.since

    def _cause(self, ended: Ended) -> str:
        """How the worker ended, with its own last line, after why it is given up."""
        how = f"killed by {signal_name(-ended.status)}" if ended.status < 0 else f"exit code {ended.status}"
        if ended.how == processes.NOT_STARTED_WORDS:
            how = "the process cannot be started"
        told = f"{how}: {ended.cause[:_MAX_LINE]}"
        if not isinstance(ended.then, GiveUp):
            return told
        if ended.then.wrong_settings:
            return f"its settings are refused on this node: {told}"
        return f"it failed {self._max_failures} times in a row: {told}"
