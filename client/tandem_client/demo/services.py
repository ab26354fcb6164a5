"""The demo's scheduler service and worker: starts both, kills the worker and waits for its replacement, stops both.

Owns the lines that the demo prints about the two; `tandem_client.services.pair` owns the processes.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence

from tandem_client.services.pair import ServicePair
from tandem_client.services.settings import Settings
from tandem_contract.logs import parse
from tandem_contract.processes import Policy, ServiceEnded, State, Supervisor

# A cold start compiles kernels.
_READY_SECONDS = 240.0
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 0.01

# Takes the name of the speaker and the line.
Say = Callable[[str, str], None]


class Services:
    """Both processes. The worker is restarted once; any other end of a process is a failure."""

    def __init__(
        self, *, scheduler_flags: Sequence[str], worker_flags: Sequence[str], settings: Settings, say: Say
    ) -> None:
        """`settings`: what the scheduler reads of its flags."""
        self._say = say
        # Leaves out the scheduler service's line per request.
        self.quiet = False
        self._pair = ServicePair(
            scheduler_flags=scheduler_flags,
            worker_flags=worker_flags,
            scheduler_policy=Policy(max_ends=1),
            # The demo kills the worker once.
            worker_policy=Policy(max_ends=2, first_pause_seconds=0.0),
            settings=settings,
            on_line=self._on_line,
            on_end=self._on_end,
            say=lambda line: say("demo", line),
        )
        self.guard, self.ready, self.worker = self._pair.guard, self._pair.ready, self._pair.worker

    async def start(self) -> None:
        """Starts both at the same time and waits until the service is ready. Raises ServiceEnded."""
        self._say("demo", "starting the scheduler service and the worker, two processes")
        self._pair.start()
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await self.guard(self._ready())
        except TimeoutError:
            raise ServiceEnded(f"the service is not ready after {_READY_SECONDS:g} s") from None

    async def kill_worker(self) -> None:
        """Kills the worker with SIGKILL and waits until another one has been started."""
        num_starts = self.worker.num_starts
        self.worker.signal(signal.SIGKILL)
        while self.worker.num_starts == num_starts:
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> list[str]:
        """Stops both, the worker last; returns a line for each that did not end well."""
        self._say("demo", "stopping both processes")
        began = time.monotonic()
        wrong = await self._pair.stop(_STOP_SECONDS)
        self._say("demo", f"both processes have ended ({time.monotonic() - began:.1f} s)")
        return wrong

    async def _ready(self) -> None:
        began = time.monotonic()
        await self._pair.listening()
        self._say("demo", f"the scheduler service listens ({time.monotonic() - began:.1f} s); it waits for a worker")
        await self.ready()
        self._say("demo", f"the worker has joined ({time.monotonic() - began:.1f} s): ready")

    def _on_end(self, program: Supervisor) -> None:
        if program.state == State.PAUSED:
            self._say("demo", str(program.ended))

    def _on_line(self, name: str, line: str) -> None:
        read = parse(line)
        if self.quiet and name == "scheduler" and read.level == "INFO":
            return
        # The demo has its own clock, and prints levels only from warnings on.
        self._say(name, read.message if read.level in ("", "INFO") else f"{read.level} {read.message}")


def free_address() -> str:
    """A loopback address with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
