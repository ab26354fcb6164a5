"""Starts a child process, reads its output and ends it.

Owns one process and its output at a time; `supervisor` decides about restarts. The programs are module names after
`python -m` and are never imported here.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence

from tandem_contract.parent import PARENT

# Takes the name of the child and one line of its output.
OnLine = Callable[[str, str], None]
# Enough for the stacks of a process that ends by a fatal signal, before which the signal is named.
_KEPT_LINES = 200
# The time for the last output after a child has ended.
_LAST_OUTPUT_SECONDS = 1.0


def missing_programs(modules: Sequence[str]) -> list[str]:
    """Returns the modules that `python -m` would not find here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def _environment() -> dict[str, str]:
    """Of a child, which imports nothing from its working directory, and so do the processes that it starts."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", PARENT: str(os.getpid())}
    if "PYTHONPATH" in found:
        # An empty entry means the working directory.
        found["PYTHONPATH"] = os.pathsep.join(filter(None, found["PYTHONPATH"].split(os.pathsep)))
    return found


class Child:
    """One `python -P -m module arguments`, in a process group of its own so that a Ctrl-C reaches only its parent."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], *, on_line: OnLine) -> None:
        self.name = name
        # Of the next start.
        self.arguments = list(arguments)
        self._module = module
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the process has started and not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The id of the running process, or of the last one."""
        return self._running().pid

    @property
    def last_lines(self) -> list[str]:
        """The last lines of the output."""
        return list(self._lines)

    async def start(self) -> None:
        """Starts the process, also after an earlier one has ended. Raises OSError."""
        self._lines.clear()
        # With asyncio's own pipe, `wait` would last until every process that inherited the pipe has ended.
        output, its_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._module, *self.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=its_end,
                stderr=its_end,
                start_new_session=True,
                env=_environment(),
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
        """Waits for the end of the process and its output; kills the processes that it started. Returns the status."""
        status = await self._running().wait()
        self.kill_group()
        if self._reading is not None:
            # A process that left the group may keep the pipe open.
            await asyncio.wait([self._reading], timeout=_LAST_OUTPUT_SECONDS)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and not to its children. Does nothing if the process has ended."""
        if self.running:
            self._running().send_signal(number)

    async def stop(self, grace_seconds: float) -> int:
        """Sends SIGTERM, and SIGKILL to the whole group after the grace. Returns the exit status."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            self.kill_group()
            return await self.wait()

    def kill_group(self) -> None:
        """Sends SIGKILL to the process and to those that it started."""
        with contextlib.suppress(ProcessLookupError):  # All have ended already.
            os.killpg(self.pid, signal.SIGKILL)

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    async def _read(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await output.readline()
            except ValueError:
                continue  # The line was longer than the reader's limit, so the reader dropped it.
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            self._on_line(self.name, line)
