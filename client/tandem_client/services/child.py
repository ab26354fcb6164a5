"""Child processes: start, output, end.

Owns one process and its output at a time; `services.supervisor` decides about restarts. The services are names after
`python -m` here: they are another part of a checkout, never imported.
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
# For output that is under way when a child has ended.
_LAST_OUTPUT_SECONDS = 1.0


def missing_programs(modules: Sequence[str]) -> list[str]:
    """The modules that `python -m` would not find here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


class Child:
    """One `python -m module arguments`, in a process group of its own so that a Ctrl-C reaches only its parent."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], *, on_line: OnLine) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The id of the process that runs, or ran last."""
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
        """Starts it, again if it ended. Raises OSError."""
        self._lines.clear()
        # Not asyncio's pipe: with that, `wait` lasts until every process that inherited the pipe has ended.
        output, its_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=its_end,
                stderr=its_end,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(its_end)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
        )
        self._reading = asyncio.create_task(self._read(reader))

    async def wait(self) -> int:
        """Returns its exit status once it has ended and its output is read; kills the processes that it had started."""
        status = await self._running().wait()
        self.kill_group()
        if self._reading is not None:
            # A process that left the group may keep the pipe open.
            await asyncio.wait([self._reading], timeout=_LAST_OUTPUT_SECONDS)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone, not to its children; nothing where it has ended."""
        if self.running:
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
        """Sends SIGKILL to it and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):  # All of them are gone already.
            os.killpg(self.pid, signal.SIGKILL)

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    async def _read(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await output.readline()
            except ValueError:
                continue  # A line beyond the reader's bound; the reader has dropped it.
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            self._on_line(self.name, line)
