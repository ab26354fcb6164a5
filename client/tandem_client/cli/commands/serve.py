"""`tandem serve`: the scheduler service and the workers of a checkout, side by side in one terminal.

Owns the command's flags, its output and its exit code; `services.pair` owns the processes.
"""

import asyncio
import functools
import shlex
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandem_client.async_client import AsyncClient
from tandem_client.cli.reporting import Exit, require_programs
from tandem_client.connection import DEFAULT_ADDRESS
from tandem_client.errors import TandemError
from tandem_client.services.line_writer import LineWriter
from tandem_client.services.log_lines import as_json
from tandem_client.services.pair import PROGRAMS, ServicePair, flags
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.supervisor import ServiceEnded
from tandem_client.services.toy import TOY_NOTICE, is_toy

# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
# The time for a reader of standard output to take the last lines.
_FLUSH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
# Each takes the memory of another model.
MAX_STANDBYS = 8
# A command that a user may paste follows.
_READY = "ready: tandem generate"
_STANDBY_HELP = "Warm workers that wait until the serving one dies; default: 0."
_SHARED_POOL_HELP = (
    "Keep the KV pool of a worker when it dies; auto: with --standby, and on a CPU where shared memory has huge pages."
)
# Says in brackets whether shared memory gets huge pages.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class SharedPool(StrEnum):
    """Whether the KV pool of a worker outlives it."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogFormat(StrEnum):
    """The format of the lines of all processes."""

    TEXT = "text"
    JSON = "json"


def serve(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"Address where the service listens; default: {DEFAULT_ADDRESS}."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled toy model.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: CUDA if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: the device decides.")
    ] = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Folder of the sockets of the service.")] = None,
    journal: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of a journal: streams with resume survive the scheduler's death."),
    ] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the Prometheus page /metrics; default: none.")
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="Log lines as text, or one JSON object per line; default: text.", envvar="TANDEM_LOG_FORMAT"),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help='More flags of the scheduler service, such as "--reflection --max-waiting 64".')
    ] = "",
    worker: Annotated[str, typer.Option(help='More flags of the worker, such as "--page-size 64".')] = "",
    standby: Annotated[int, typer.Option(min=0, max=MAX_STANDBYS, metavar="N", help=_STANDBY_HELP)] = 0,
    shared_pool: Annotated[SharedPool, typer.Option(help=_SHARED_POOL_HELP)] = SharedPool.AUTO,
) -> None:
    """Run the scheduler service and a worker until Ctrl-C, and restart them when they die."""
    require_programs(PROGRAMS, "tandem serve")
    shared = flags(runtime_dir=runtime_dir, log_format=log_format)
    holds_pools = _holds_pools(shared_pool, device, standby)
    screen = _Screen(as_json=log_format == LogFormat.JSON)
    pair = ServicePair(
        scheduler_flags=[
            *flags(listen=listen, journal=journal, metrics_listen=metrics_listen),
            *shared,
            *shlex.split(scheduler),
        ],
        worker_flags=[
            *flags(model=model, device=device, dtype=dtype, shared_pool=shared_pool.value if holds_pools else "off"),
            *shared,
            *shlex.split(worker),
        ],
        scheduler_policy=RestartPolicy(),
        # The service goes on without a worker, and its health says why.
        worker_policy=RestartPolicy(max_ends=None),
        standbys=standby,
        holder_flags=shared if holds_pools else None,
        on_line=screen.show_child,
        say=screen.say,
    )
    code, cause = asyncio.run(_serve(pair, screen.say))
    screen.close()
    if cause:
        _print_cause(cause, in_json=log_format == LogFormat.JSON)
    raise typer.Exit(code)


def _holds_pools(shared_pool: SharedPool, device: str | None, num_standbys: int) -> bool:
    """Whether the KV pool is in memory that a holder keeps.

    It costs something: on a CPU decode steps take some 10 % longer where shared memory has no huge pages, and a GPU has
    a smaller pool.
    """
    if shared_pool != SharedPool.AUTO:
        return shared_pool == SharedPool.ON
    if sys.platform != "linux":
        return False
    is_gpu = (device or "").startswith("cuda")
    return num_standbys > 0 or (not is_gpu and _shared_memory_has_huge_pages())


def _shared_memory_has_huge_pages() -> bool:
    try:
        chosen = _HUGE_PAGES.read_text()
    except OSError:
        return False
    return "[never]" not in chosen and "[deny]" not in chosen


async def _serve(pair: ServicePair, say: Callable[[str], None]) -> tuple[Exit, str]:
    """Serves until a signal comes or a process ends for good; returns the exit code, and the cause or ""."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            say("stopping at once")
            pair.kill()
            return
        say("stopping; interrupt again to stop at once")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    pair.start()
    announcing = asyncio.create_task(_announce(pair, say))
    try:
        await pair.guard(stop.wait())
    except ServiceEnded as end:
        return (Exit.USAGE if end.wrong_settings else Exit.ERROR), str(end)
    finally:
        announcing.cancel()
        await pair.stop(_STOP_SECONDS)
    return Exit.OK, ""


async def _announce(pair: ServicePair, say: Callable[[str], None]) -> None:
    """Prints a command to paste whenever both processes serve: after the start, and after each restart."""
    noticed = False
    while True:
        address = await pair.ready()
        if not noticed and await _serves_toy(address):
            say(TOY_NOTICE)
        noticed = True
        named = "" if address == DEFAULT_ADDRESS else f"--address {address} "
        say(f'{_READY} {named}"Return the"')
        await pair.down()


async def _serves_toy(address: str) -> bool:
    try:
        async with AsyncClient(address) as client:
            return is_toy(await client.model_info(timeout=_ANSWER_SECONDS))
    except TandemError:
        return False


def _print_cause(cause: str, *, in_json: bool) -> None:
    # Standard error may be as blocked as standard output was.
    writer = LineWriter(sys.stderr)
    line = f"error: {cause}"
    writer.write(as_json("serve", line, level="ERROR") if in_json else line)
    writer.close(_FLUSH_SECONDS)


class _Screen:
    """Standard output: the lines of the children and of this command, each with the name of its program before it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._writer = LineWriter(sys.stdout, own_line=functools.partial(self._formed, "serve"))

    def show_child(self, name: str, line: str) -> None:
        """Prints one line of a child, except its `ready` line: this command prints one when both serve."""
        if _READY not in line:
            self._show(name, line)

    def say(self, line: str) -> None:
        """Prints one line of this command."""
        self._show("serve", line)

    def _show(self, name: str, line: str) -> None:
        # A line of a JSON log already names its process.
        self._writer.write(self._formed(name, line))

    def _formed(self, name: str, line: str) -> str:
        return as_json(name, line) if self._as_json else f"{name:>9} | {line}"

    def close(self) -> None:
        """Waits a moment until the last lines are written."""
        self._writer.close(_FLUSH_SECONDS)
