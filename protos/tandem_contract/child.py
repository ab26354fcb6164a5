"""One life of a child process: its start, the lines of its output, and its end.

Owns the process and two threads, of which one reads the output and one waits for the end. They leave what they find for
`Child.take`, so the user has no state that another thread changes. `processes` decides what follows an end.
`die_with_parent` is the other side: it ends a process with the one that started it.
"""

import contextlib
import ctypes
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tandem_contract.needed import NeededThread, started

_PR_SET_PDEATHSIG = 1
# Has the id of the process that started this one. When this one asks the system, that one may be dead already, and
# another process in its place.
PARENT = "_TANDEM_PARENT"
# The most bytes of one line; the rest is dropped.
_MAX_LINE_BYTES = 1 << 16
# The most lines that were not taken. Then the process waits at its pipe.
_MAX_WAITING = 1024
_FULL_SECONDS = 0.5
# The time for the last output after a process has ended.
_LAST_OUTPUT_SECONDS = 1.0
_ORPHANS_SECONDS = 0.5
# Has a line with the number of processes that the kernel has killed because memory ran out, also that of a container.
_KERNEL_COUNTS = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    argv: tuple[str, ...]
    # Over that of this process.
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    # It inherits these; here they are closed after the start.
    descriptors: tuple[int, ...] = ()
    # Without: its stderr is that of this process, because it writes the log by itself.
    takes_stderr: bool = True
    # Without: it has a process group of its own in this session. The kernel divides the CPU between sessions first
    # (`sched_autogroup_enabled`), so a part of a service stays in the service's session: beside a core without one,
    # a front end under full load delivered its tokens up to five times as late.
    has_session: bool = True


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command of a module, which imports nothing from its working directory."""
    return (sys.executable, "-P", "-m", module, *arguments)


class Child:
    """One process in a group of its own, so that a Ctrl-C reaches only its parent. What it started ends with it.

    The process may ask the kernel to end it with the thread that made this object (`die_with_parent`).
    """

    def __init__(self, program: Program, wake: Callable[[], None]) -> None:
        """Starts the process. Another thread calls `wake` when there is something to take. Raises OSError."""
        if os.getpid() == 1:
            reap_orphans()
        self._wake = wake
        self._lines: queue.Queue[str] = queue.Queue(_MAX_WAITING)
        self._status: int | None = None
        # Guards the number of the process, which may be another's once it is reaped.
        self._lock, self._is_reaped = threading.Lock(), False
        self._num_killed = _num_killed_for_memory()
        # The exit status, negative for a signal, once `take` has returned all lines before it.
        self.end: int | None = None
        try:
            self._process = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if program.takes_stderr else None,
                start_new_session=program.has_session,
                process_group=None if program.has_session else 0,
                pass_fds=program.descriptors,
                env=_environment(program.environment),
            )
        finally:
            for descriptor in program.descriptors:
                os.close(descriptor)
        self.pid = self._process.pid
        _ours.add(self.pid)
        output = self._process.stdout
        assert output is not None
        self._reader = NeededThread(target=lambda: self._read(output), name="output")
        try:
            started(self._reader)
            started(NeededThread(target=self._wait, name="end"))
        except OSError:
            kill_group(self.pid)
            self._reap()
            if not self._reader.is_alive():
                output.close()
            raise

    def take(self) -> list[str]:
        """Returns the lines since the last call, and then sets `end` if the process has ended."""
        # Read before the lines, because all of them came before it.
        status = self._status
        lines: list[str] = []
        for _ in range(_MAX_WAITING):
            try:
                lines.append(self._lines.get_nowait())
            except queue.Empty:
                self.end = status
                return lines
        self._wake()
        return lines

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and not to its children. Does nothing if the process has ended."""
        with self._lock:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to those that it started."""
        with self._lock:
            if not self._is_reaped:
                kill_group(self.pid)

    def how_it_ended(self) -> str:
        """`ended with exit code 3`, `was ended by SIGKILL`: continues a sentence. Call it after the end."""
        assert self.end is not None, "the process has ended"
        if self.end >= 0:
            return f"ended with exit code {self.end}"
        ended = f"was ended by {signal_name(-self.end)}"
        if self.end == -signal.SIGKILL and _num_killed_for_memory() > self._num_killed:
            ended += ", perhaps because memory ran out (the kernel has killed a process for that)"
        return ended

    def _read(self, output: IO[bytes]) -> None:
        is_rest = False
        with output:
            while raw := output.readline(_MAX_LINE_BYTES):
                if not is_rest:
                    self._put(raw.decode(errors="replace").rstrip())
                is_rest = not raw.endswith(b"\n")

    def _put(self, line: str) -> None:
        """Waits while the queue is full. After the end of the process, drops lines of those that left its group."""
        while self._status is None:
            try:
                self._lines.put(line, timeout=_FULL_SECONDS)
            except queue.Full:
                continue
            if self._lines.qsize() == 1:
                self._wake()
            return

    def _wait(self) -> None:
        try:
            if sys.platform == "linux":
                # The number stays that of this process while its group is killed.
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            else:
                self._process.wait()
            is_ours = True
        except ChildProcessError:
            # Another part has reaped it, so its number may be another process's.
            is_ours = False
        with self._lock:
            if is_ours:
                kill_group(self.pid)
            status = self._reap()
        # Not until the end of the pipe, which a process that left the group may keep open.
        self._reader.join(_LAST_OUTPUT_SECONDS)
        self._status = status
        self._wake()
        # What it started is this process's if orphans are, as they are process 1's.
        reap_group(self.pid)

    def _reap(self) -> int:
        status = self._process.wait()
        self._is_reaped = True
        _ours.discard(self.pid)
        return status


def kill_group(group: int) -> None:
    """Sends SIGKILL to each process of the group, if there is any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def reap_group(group: int) -> None:
    """Waits for the end of each process of the group that is a child of this one, as its orphans may be."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


def signal_name(number: int) -> str:
    """`SIGTERM`; `signal 99` if the system has no name for it."""
    names = {int(member): member.name for member in signal.Signals}
    return names.get(number, f"signal {number}")


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child: it and its own children import nothing from their working directory."""
    environment = {**os.environ, **more, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", PARENT: str(os.getpid())}
    if "PYTHONPATH" in environment:
        # An empty entry means the working directory.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, environment["PYTHONPATH"].split(os.pathsep)))
    return environment


def _num_killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed because memory ran out; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in _KERNEL_COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


# Processes that a Child reaps.
_ours: set[int] = set()


@functools.cache
def reap_orphans() -> None:
    """Reaps from now on what a dead child has left that is in no group of a Child. For processes that get orphans.

    Other parts that start processes reap them soon; so one that is still dead at the next look is an orphan. Raises
    OSError.
    """
    started(threading.Thread(target=_reap_orphans, name="orphans", daemon=True))


def _reap_orphans() -> None:
    seen = 0
    while True:
        time.sleep(_ORPHANS_SECONDS)
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        dead = ended.si_pid if ended is not None else 0
        if dead and dead == seen and dead not in _ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(dead, 0)
        seen = dead


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, also if the parent is killed. Linux only.

    Ends the process at once if the parent has ended already. Raises OSError.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)
