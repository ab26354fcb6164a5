"""`tandem serve`: the scheduler service and one worker of a checkout, side by side in one terminal.

Owns both processes: what they print, when a worker is started again, and the order in which they stop.
"""

import asyncio
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console

from client.async_client import AsyncClient
from client.cli.reporting import Exit, fail
from client.connection import DEFAULT_ADDRESS
from client.errors import Unavailable
from client.processes import Child, missing_programs

PROGRAMS = ("scheduler_svc", "gpu_worker")
# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 30.0
# A worker that ran so long has recovered: its next loss is a first one again.
_STEADY_SECONDS = 60.0
_LOOK_SECONDS = 0.2
# What the two say of themselves: where the service listens, and that it took the worker.
_LISTENING = re.compile(r"^frontend listening on (\S+)$")
_JOINED = re.compile(r"\bjoined; generation \d+$")


def serve(
    listen: Annotated[str, typer.Option(help="Where the service listens.")] = DEFAULT_ADDRESS,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled one.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: CUDA if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; default: by device.")] = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Folder of the sockets.")] = None,
    scheduler: Annotated[str, typer.Option(help='More flags: "--reflection --max-waiting 64".')] = "",
    worker: Annotated[str, typer.Option(help='More flags: "--page-size 64".')] = "",
) -> None:
    """Run scheduler service and worker until Ctrl-C; a lost worker is started again."""
    missing = missing_programs(PROGRAMS)
    if missing:
        raise fail(
            f"{' and '.join(missing)} cannot be found: this environment has the client alone. The services run from "
            "a checkout: make run-scheduler and make run-worker there"
        )
    shared = _flags(runtime_dir=runtime_dir)
    console = Console(highlight=False, markup=False)

    def show(name: str, line: str) -> None:
        console.print(f"{name:>9} | {line}", soft_wrap=True)

    pair = _Pair(
        [*_flags(listen=listen), *shared, *shlex.split(scheduler)],
        ["--exit-with-parent", *_flags(model=model, device=device, dtype=dtype), *shared, *shlex.split(worker)],
        show=show,
    )
    raise typer.Exit(asyncio.run(pair.run()))


def _flags(**values: str | None) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


class _Pair:
    """Both processes. The worker stops last: streams that finish within the grace need it."""

    def __init__(
        self, scheduler_flags: Sequence[str], worker_flags: Sequence[str], *, show: Callable[[str, str], None]
    ) -> None:
        self._show = show
        self._scheduler = Child("scheduler", PROGRAMS[0], scheduler_flags, on_line=self._on_line)
        self._worker = Child("worker", PROGRAMS[1], worker_flags, on_line=self._on_line)
        self._stop = asyncio.Event()
        # "" until this very scheduler listens: what else answers at the address asked for is not ours.
        self._address = ""
        self._listening = asyncio.Event()
        self._joined = False
        self._served = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        await self._scheduler.start()
        await self._worker.start()
        waits = {
            asyncio.create_task(self._stop.wait()): Exit.OK,
            asyncio.create_task(self._scheduler.wait()): Exit.ERROR,
            asyncio.create_task(self._keep_worker()): Exit.ERROR,
        }
        ready = asyncio.create_task(self._announce())
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (*pending, ready):
            task.cancel()
        await self._scheduler.stop(_STOP_SECONDS)
        await self._worker.stop(_STOP_SECONDS)
        return max(waits[task] for task in done)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._say("stopping at once")
            self._scheduler.kill_group()
            self._worker.kill_group()
            return
        self._say("stopping; once more to stop at once")
        self._stop.set()

    def _say(self, line: str) -> None:
        self._show("serve", line)

    def _on_line(self, name: str, line: str) -> None:
        self._show(name, line)
        if name == self._worker.name:
            self._joined = self._joined or _JOINED.search(line) is not None
        elif (found := _LISTENING.match(line)) is not None:
            self._address = found[1]
            self._listening.set()

    async def _announce(self) -> None:
        """Says ready once its own scheduler listens and its own worker serves there."""
        await self._listening.wait()
        async with AsyncClient(self._address) as client:
            await client.wait_ready()
            while not await self._is_joined(client):
                await asyncio.sleep(_LOOK_SECONDS)
        self._served = True
        self._say(f'ready: tandem generate --address {self._address} "Return the"')

    async def _is_joined(self, client: AsyncClient) -> bool:
        if self._joined:
            return True
        # A worker whose log level is above info does not say that it joined; its service knows.
        try:
            return self._worker.pid in {worker.pid for worker in (await client.load()).per_worker}
        except Unavailable:
            return False

    async def _keep_worker(self) -> None:
        """Starts a lost worker again, with growing pauses; returns where it never came to serve."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            started = time.monotonic()
            status = await self._worker.wait()
            if not self._served:
                self._say(f"the worker ended with status {status} before it served; its last lines stand above")
                return
            if time.monotonic() - started > _STEADY_SECONDS:
                pause_seconds = _FIRST_PAUSE_SECONDS
            self._say(f"the worker ended with status {status}; starting it again in {pause_seconds:g} s")
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
            await self._worker.start()
