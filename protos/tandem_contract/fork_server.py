"""A process that loads something once, and then forks a child for each piece of work: its user's end, and its own.

A child may be killed at any time, and the next one has at once what was loaded. One child runs at a time, and
serves its user on a socket of packets. Knows nothing of what a child does.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem_contract.child import PARENT, die_with_parent, kill_group, reap_group
from tandem_contract.needed import NeededThread, started
from tandem_contract.stopping import kept_from_children

# The length of the sentence with which a process says why it cannot load.
MAX_WORDS = 1_000
_FORK = b"fork"
# CPUCLOCK_SCHED of Linux, and the unit of /proc.
_CPU_CLOCK, _TICKS = 2, os.sysconf("SC_CLK_TCK")


@dataclass(slots=True, eq=False)
class ForkServer:
    """The user's end: one process after another. Nothing waits for the process, except `kill`.

    The program `python -m module` calls `serve_forks`; its `load` gets the rest by name: the arguments, which are
    JSON, the contents of the files, and the descriptors, which stay the caller's.
    """

    module: str
    arguments: Mapping[str, Any]
    files: Mapping[str, bytes] = field(kw_only=True)
    descriptors: Mapping[str, int] = field(kw_only=True, default_factory=dict[str, int])
    _life: "_Life | None" = field(init=False, default=None)

    @property
    def pid(self) -> int | None:
        """The id of the process that forks; None if none runs."""
        return self._life.pid if self._life is not None else None

    def fork(self) -> socket.socket:
        """Kills the child, and returns the socket of the next one, which does not block.

        Starts the process if none runs: packets wait until it has loaded. Raises OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                if self._life is None or not self._life.ask_for(theirs):
                    self.kill()
                    self._life = _Life(self._popen)
                    self._life.ask_for(theirs)
        except BaseException:
            ours.close()
            raise
        return ours

    def last_words(self) -> str | None:
        """Why the process has ended, empty if it did not say; None while it runs.

        Raises OSError if the process could not be started.
        """
        return self._life.last_words() if self._life is not None else ""

    def fileno(self) -> int:
        """A descriptor that is readable when the process has ended."""
        assert self._life is not None, "the process was started"
        return self._life.control.fileno()

    def kill(self) -> None:
        """Ends the process and its child, and waits for that. The next `fork` starts another one."""
        if self._life is not None:
            self._life.kill()
            self._life = None

    def _popen(self, control: int) -> "subprocess.Popen[bytes]":
        with ExitStack() as stack:
            files: dict[str, int] = {}
            for name, content in self.files.items():
                file = stack.enter_context(open(os.memfd_create(f"tandem-{name}", os.MFD_CLOEXEC), "wb"))
                file.write(content)
                file.flush()
                files[name] = file.fileno()
            given = {"control": control, "files": files, "arguments": {**self.arguments, **self.descriptors}}
            # The user's log is the only writer of stderr; the process says on its socket why it cannot load.
            return subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(control, *files.values(), *self.descriptors.values()),
                process_group=0,
                env={**os.environ, PARENT: str(os.getpid())},
            )


class _Life:
    """One process, in a group of its own, from its start until it is reaped, also without a call.

    The kernel ends a process with the thread that started it, so the thread that waits for this one starts it too.
    """

    def __init__(self, popen: "Callable[[int], subprocess.Popen[bytes]]") -> None:
        """`popen` starts the process, which inherits this end of a socket. Raises OSError."""
        self._popen = popen
        self.pid: int | None = None
        self._failure: OSError | None = None
        # Guards the process from its start on, and until it is reaped, when its number may be another's.
        self._lock, self._is_wanted = threading.Lock(), True
        self.control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self._thread = NeededThread(target=self._run, name="fork-server")
        try:
            started(self._thread)
        except OSError:
            self.control.close()
            self._theirs.close()
            raise

    def ask_for(self, child: socket.socket) -> bool:
        """Asks for a child that has this socket. Returns whether that was possible."""
        try:
            socket.send_fds(self.control, [_FORK], [child.fileno()])
        except OSError:
            return False
        return True

    def last_words(self) -> str | None:
        try:
            words = self.control.recv(MAX_WORDS)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # The kernel reports first that the process has not read everything, and then gives what it had sent.
            words = self.control.recv(MAX_WORDS)
        if self._failure is not None:
            raise self._failure
        return words.decode("utf-8", "replace")

    def kill(self) -> None:
        """Ends the process with its child. Returns when it is reaped."""
        self.control.close()
        with self._lock:
            self._is_wanted = False
            if self.pid:
                kill_group(self.pid)
        self._thread.join()

    def _run(self) -> None:
        with self._theirs, self._lock:
            if not self._is_wanted:
                return
            try:
                with kept_from_children():
                    process = self._popen(self._theirs.fileno())
            except OSError as error:
                self._failure = error
                return
            self.pid = process.pid
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            kill_group(self.pid)
            process.wait()
            # Its child is this process's if orphans are, as they are process 1's.
            reap_group(self.pid)
            self.pid = None


# Loads what the children share; returns what a child does with its socket.
Load = Callable[[dict[str, Any]], Callable[[socket.socket], None]]


def serve_forks(load: Load) -> int:
    """The process's own end: loads, and forks children until its user has ended. Returns the exit code."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        print("a front end or a worker starts this program, with what it serves as its only argument", file=sys.stderr)
        return 0 if sys.argv[1:] == ["--help"] else 2
    die_with_parent()
    # If memory is short, this process goes before its user; it is started again.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # So no dead child stays a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    given = json.loads(sys.argv[1])
    control = socket.socket(fileno=given["control"])
    try:
        serve = load({**given["arguments"], **{name: _content(number) for name, number in given["files"].items()}})
    except BaseException as error:  # llguidance's panics are not Exceptions
        control.send(f"{type(error).__name__}: {error}".encode()[:MAX_WORDS])
        return 1
    # The children share what is here.
    gc.freeze()
    os.environ[PARENT] = str(os.getpid())
    child = 0
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, len(_FORK), 1)
        _end(child)
        if not packet:
            return 0
        connection = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if not child:
            code = 1
            try:
                die_with_parent()
                control.close()
                serve(connection)
                code = 0
            finally:
                os._exit(code)
        connection.close()


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _end(child: int) -> None:
    """Kills a child of this process. Does nothing if it has ended, because its number may be another's by now."""
    with suppress(ChildProcessError):
        if child and os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def cpu_seconds(process: int, thread: int = 0) -> float:
    """CPU time that another process has used, or one thread of it; 0 if it is gone. A thread's is milliseconds old."""
    if not thread:
        with suppress(OSError):
            # clock_getcpuclockid(3); the kernel gives no thread's clock to another process.
            return time.clock_gettime((~process << 3) | _CPU_CLOCK)
        return 0.0
    folder = Path(f"/proc/{process}/task/{thread}")
    with suppress(OSError, ValueError, IndexError):
        return int((folder / "schedstat").read_text().split()[0]) / 1e9
    with suppress(OSError, ValueError, IndexError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0
