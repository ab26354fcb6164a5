"""`tandem serve`: the scheduler service and one worker of a checkout, side by side in one terminal.

Owns both processes: what they print, when a worker is started again, and the order in which they stop.
"""

import asyncio
import shlex
import signal
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from client.async_client import AsyncClient
from client.cli.reporting import Exit, fail
from client.connection import DEFAULT_ADDRESS
from client.processes import Child, missing_programs

PROGRAMS = ("scheduler_svc", "gpu_worker")
# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 30.0
# A worker that ran so long has recovered: its next loss is a first one again.
_STEADY_SECONDS = 60.0


def serve(
    listen: Annotated[str, typer.Option(help="Where the service listens.")] = DEFAULT_ADDRESS,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled one.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cpu; default: CUDA if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16.")] = None,
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
        Child("scheduler", PROGRAMS[0], [*_flags(listen=listen), *shared, *shlex.split(scheduler)], on_line=show),
        Child(
            "worker",
            PROGRAMS[1],
            ["--exit-with-parent", *_flags(model=model, device=device, dtype=dtype), *shared, *shlex.split(worker)],
            on_line=show,
        ),
        listen=listen,
        say=lambda line: show("serve", line),
    )
    raise typer.Exit(asyncio.run(pair.run()))


def _flags(**values: str | None) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


class _Pair:
    """Both processes. The worker stops last: streams that finish within the grace need it."""

    def __init__(self, scheduler: Child, worker: Child, *, listen: str, say: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._listen = listen
        self._say = say
        self._stop = asyncio.Event()
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

    async def _announce(self) -> None:
        async with AsyncClient(self._listen) as client:
            await client.wait_ready()
        self._served = True
        self._say(f'ready: tandem generate --address {self._listen} "Return the"')

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
