"""Kills hung workers that were started by the program which started this service (`tandem serve`).

Owns a pidfd of each such worker, opened when the worker joins, so that a process id that the system gives to another
process later is never signalled. Other workers are left alone: another program started them and watches them.
"""

import logging
import os
import signal
from collections.abc import Container
from pathlib import Path

log = logging.getLogger("tandem.core")


class WorkerProcesses:
    """Workers that this service may kill. Without a parent process (None) it kills none."""

    def __init__(self, parent: int | None) -> None:
        """`parent` is the process id of the program that started this service and restarts it and its worker."""
        self._parent = parent
        self._descriptors: dict[str, tuple[int, int]] = {}
        """Worker -> (process id, pidfd)."""

    def joined(self, worker: str, pid: int) -> None:
        """Remembers the process if it is a child of `parent` and runs as this user."""
        self._forget(worker)
        if self._parent is None or not pid or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # It has ended, or runs in another namespace, or the kernel has no pidfds.
        # Checked after the descriptor was opened, so that both mean the same process.
        if _parent_and_user(pid) == (self._parent, os.getuid()):
            self._descriptors[worker] = pid, descriptor
        else:
            os.close(descriptor)

    def kill(self, worker: str) -> None:
        """Sends SIGKILL to the worker's process if this service may kill it."""
        if worker not in self._descriptors:
            return
        pid, descriptor = self._descriptors[worker]
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return
        log.warning("killed the hung worker %s, process %d", worker, pid)

    def keep(self, workers: Container[str]) -> None:
        """Forgets the processes of all other workers."""
        for worker in [worker for worker in self._descriptors if worker not in workers]:
            self._forget(worker)

    def _forget(self, worker: str) -> None:
        if worker in self._descriptors:
            os.close(self._descriptors.pop(worker)[1])


def _parent_and_user(pid: int) -> tuple[int, int] | None:
    """Returns the parent's process id and the real user id of a process, None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(values["PPid"]), int(values["Uid"].split()[0])
    except (OSError, ValueError, KeyError):
        return None
