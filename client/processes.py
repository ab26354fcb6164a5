"""Child processes: started, listened to, stopped.

Owns a child's life and its output. Knows the services' names only as words after `python -m`: they are another part
of a checkout, never imported here.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence

# Name of the child, one line that it printed.
OnLine = Callable[[str, str], None]
_KEPT_LINES = 40


def missing_programs(modules: Sequence[str]) -> list[str]:
    """Those of the modules that `python -m` would not find here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


class Child:
    """One `python -m module arguments`, in a process group of its own so that a Ctrl-C reaches only its parent."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], *, on_line: OnLine) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether it ever ran."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._running().returncode

    @property
    def last_lines(self) -> list[str]:
        """The end of its output."""
        return list(self._lines)

    async def start(self) -> None:
        """Starts it, again if it ended."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def wait(self) -> int:
        """Returns its exit status once it has ended and its output is read."""
        status = await self._running().wait()
        if self._reader is not None:
            await self._reader
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone, not to its children."""
        if self.returncode is None:
            self._running().send_signal(number)

    async def stop(self, grace_seconds: float) -> int:
        """SIGTERM, and SIGKILL for its whole group after the grace; its exit status."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            self.kill_group()
            return await self.wait()

    def kill_group(self) -> None:
        """SIGKILL to it and to what it started."""
        with contextlib.suppress(ProcessLookupError):  # All of them are gone already.
            os.killpg(self.pid, signal.SIGKILL)

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:
                continue  # A line beyond the reader's bound; the reader has dropped it.
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            self._on_line(self.name, line)
