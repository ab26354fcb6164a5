"""The demo's scheduler service and worker: a line for each phase of their start, the worker killed and replaced, both
stopped in good order.

Owns what the demo says of the two; `tandem_client.services.pair` owns the processes. Knows nothing of the prompts.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem_client.services.log_lines import parse
from tandem_client.services.pair import ServicePair
from tandem_client.services.restarts import RestartPolicy

# A cold start compiles kernels.
_READY_SECONDS = 240.0
_STOP_SECONDS = 20.0
# Where the worker keeps its compiled kernels, below the user's folder for caches.
_KERNELS = Path("tandem") / "inductor"

_Result = TypeVar("_Result")
# The speaker and the line.
Say = Callable[[str, str], None]


class ServiceEnded(Exception):
    """A process ended that should have gone on, or did not come to serve; the message ends with the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the service listens and where its sockets are."""

    listen: str
    runtime_dir: Path


class Services:
    """Both processes. A death that the demo did not cause is a failure, except that a killed worker is replaced."""

    def __init__(
        self,
        places: Places,
        *,
        worker_settings: Mapping[str, str | None],
        worker_flags: Sequence[str],
        scheduler_flags: Sequence[str],
        say: Say,
    ) -> None:
        self._say = say
        self.listen = places.listen
        # Leaves out the scheduler service's line per request.
        self.quiet = False
        shared = f"--runtime-dir={places.runtime_dir}"
        settings = [f"--{name}={value}" for name, value in worker_settings.items() if value is not None]
        self._pair = ServicePair(
            scheduler_flags=[f"--listen={places.listen}", shared, *scheduler_flags],
            worker_flags=[shared, *settings, *worker_flags],
            scheduler_policy=RestartPolicy(max_ends=1),
            # The demo kills it once.
            worker_policy=RestartPolicy(max_ends=2, first_pause_seconds=0.0),
            on_line=self._on_line,
            say=lambda line: say("demo", line),
        )

    @property
    def worker_pid(self) -> int:
        """The process id of the worker that was started last."""
        return self._pair.worker.child.pid

    async def start(self) -> None:
        """Starts both at once; returns when the service serves. Raises ServiceEnded."""
        self._say("demo", "starting the scheduler service and the worker, two processes")
        if not _has_compiled_kernels():
            self._say("demo", "compiling kernels, once, about 30 s")
        self._pair.start()
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await self.guard(self._ready())
        except TimeoutError:
            raise ServiceEnded(f"the service is not ready after {_READY_SECONDS:g} s") from None

    async def guard(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Does the work while both processes run. Raises ServiceEnded where one is given up."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._pair.failed())
        try:
            await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            failing.cancel()
            working.cancel()
        await asyncio.wait([working])
        raise ServiceEnded(failing.result().message)

    async def kill_worker(self) -> None:
        """Kills the worker with SIGKILL; returns once another one has been started."""
        next_start = self._pair.worker.next_start
        self._pair.worker.child.signal(signal.SIGKILL)
        await next_start.wait()

    async def ready(self) -> None:
        """Returns once the service serves with the worker that was started last."""
        await self._pair.ready()

    async def stop(self) -> list[str]:
        """Stops both, the worker last; what was wrong with how they ended."""
        self._say("demo", "stopping both")
        began = time.monotonic()
        wrong = await self._pair.stop(_STOP_SECONDS)
        self._say("demo", f"both have ended ({time.monotonic() - began:.1f} s)")
        return wrong

    async def _ready(self) -> None:
        began = time.monotonic()
        await self._pair.listening()
        self._say("demo", f"the scheduler service listens ({time.monotonic() - began:.1f} s); it waits for a worker")
        await self._pair.ready()
        self._say("demo", f"the worker has joined ({time.monotonic() - began:.1f} s): ready")

    def _on_line(self, name: str, line: str) -> None:
        read = parse(line)
        if self.quiet and name == "scheduler" and read.level == "INFO":
            return
        # The demo has a clock of its own, and what is not a warning needs no level.
        self._say(name, read.message if read.level in ("", "INFO") else f"{read.level} {read.message}")


def free_address() -> str:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _has_compiled_kernels() -> bool:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or caches / _KERNELS)
    return folder.is_dir() and any(folder.iterdir())
