"""The demo's scheduler service and worker: started with a line per phase, the worker killed and started again, both
stopped in good order.

Owns the two processes and their settings. Knows nothing of what they are asked.
"""

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from client.async_client import AsyncClient
from client.errors import Unavailable
from client.processes import Child

# A cold start compiles kernels.
_READY_SECONDS = 240.0
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 20.0
# The demo has a clock of its own, and what is no warning needs no level.
_STAMP = re.compile(r"^(?:[\d-]+ )?[\d:,.]+ (?=[\w.]+ [A-Z]|[A-Z]+ )")
_INFO = re.compile(r"^(?:[\w.]+ )?INFO (?:frontend \d+: )?")

_Result = TypeVar("_Result")
# Who says it, and what.
Say = Callable[[str, str], None]


class ServiceEnded(Exception):
    """A process ended that should have gone on; the message carries its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the service listens and where its sockets are."""

    listen: str
    runtime_dir: Path


class Services:
    """Both processes."""

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
        self._failed = asyncio.Event()
        # Children whose end is no failure.
        self._expected: set[Child] = set()
        self._supervisors: list[asyncio.Task[None]] = []
        shared = f"--runtime-dir={places.runtime_dir}"
        settings = [f"--{name}={value}" for name, value in worker_settings.items() if value is not None]
        self._scheduler = Child(
            "scheduler",
            "scheduler_svc",
            [f"--listen={places.listen}", shared, *scheduler_flags],
            on_line=self._on_line,
        )
        self._worker = Child(
            "worker",
            "gpu_worker",
            [shared, "--exit-with-parent", *settings, *worker_flags],
            on_line=self._on_line,
        )

    @property
    def worker_pid(self) -> int:
        """Of the worker that was started last."""
        return self._worker.pid

    async def start(self, client: AsyncClient) -> None:
        """Starts both at once; returns when the service serves. Raises ServiceEnded."""
        self._say("demo", "starting the scheduler service and the worker, two processes")
        await self._start(self._scheduler)
        await self._start(self._worker)
        await self.guard(self._ready(client))

    async def guard(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Does the work while both processes run. Raises ServiceEnded where one ends that nobody stopped."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            failing.cancel()
            working.cancel()
        await asyncio.wait([working])
        child = self._worker if self._worker.returncode is not None else self._scheduler
        last = "\n".join(child.last_lines) or "it printed nothing"
        raise ServiceEnded(f"the {child.name} ended with status {child.returncode}; its last lines:\n{last}")

    async def kill_worker(self) -> int:
        """SIGKILL, no time to say goodbye; the process's id, once it is gone."""
        self._expected.add(self._worker)
        self._worker.signal(signal.SIGKILL)
        await self._worker.wait()
        return self._worker.pid

    async def restart_worker(self) -> None:
        """Starts a worker in the place of the one that was killed; does not wait for it to join."""
        self._expected.discard(self._worker)
        await self._start(self._worker)

    async def stop(self) -> list[str]:
        """Stops both, the worker last; what was wrong with how they ended."""
        wrong: list[str] = []
        for child in (self._scheduler, self._worker):
            self._expected.add(child)
            if child.started:
                status = await child.stop(_STOP_SECONDS)
                self._say("demo", f"the {child.name} has ended with status {status}")
                wrong += [f"the {child.name} ended with status {status}"] if status != 0 else []
        return wrong

    async def _start(self, child: Child) -> None:
        await child.start()
        self._supervisors.append(asyncio.create_task(self._supervise(child)))

    async def _supervise(self, child: Child) -> None:
        await child.wait()
        if child not in self._expected:
            self._failed.set()

    async def _ready(self, client: AsyncClient) -> None:
        while not await _answers(client):
            await asyncio.sleep(_LOOK_SECONDS)
        self._say("demo", "the scheduler service answers; it waits for a worker")
        await client.wait_ready(_READY_SECONDS)
        self._say("demo", "the worker has joined: ready")

    def _on_line(self, name: str, line: str) -> None:
        plain = _STAMP.sub("", line)
        if not (self.quiet and _INFO.match(plain) and name == "scheduler"):
            self._say(name, _INFO.sub("", plain))


def free_address() -> str:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def _answers(client: AsyncClient) -> bool:
    try:
        await client.health()
    except Unavailable:
        return False
    return True
