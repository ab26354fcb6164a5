"""`tandem serve`: the scheduler service and the workers of a checkout, side by side in one terminal.

Owns the command's flags, its output and its exit code; `services.pair` owns the processes.
"""

import asyncio
import functools
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from tandem_client.cli.commands import serve_options as options
from tandem_client.cli.commands.serve_options import LogFormat, SharedPool
from tandem_client.cli.reporting import Exit, require_programs
from tandem_client.connection import DEFAULT_ADDRESS
from tandem_client.errors import TandemError
from tandem_client.services.line_writer import LineWriter
from tandem_client.services.pair import READY, ServicePair, flags
from tandem_client.services.probe import Probe
from tandem_client.services.programs import PROGRAMS
from tandem_client.services.toy import TOY_NOTICE, is_toy
from tandem_contract.logs import as_json
from tandem_contract.processes import ServiceEnded

# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
# The time for a reader of standard output to take the last lines.
_FLUSH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
# Says in brackets whether shared memory gets huge pages.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def serve(
    listen: options.Listen = None,
    http: options.Http = None,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    runtime_dir: options.RuntimeDir = None,
    journal: options.Journal = None,
    metrics_listen: options.MetricsListen = None,
    tokens: options.Tokens = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_client_ca: options.TlsClientCa = None,
    health_listen: options.HealthListen = None,
    log_format: options.LogLines = None,
    scheduler: options.SchedulerFlags = "",
    worker: options.WorkerFlags = "",
    gateway: options.GatewayFlags = "",
    standby: options.Standbys = 0,
    shared_pool: options.Pool = SharedPool.AUTO,
) -> None:
    """Run the scheduler service and a worker until Ctrl-C, and restart them when they die."""
    require_programs(PROGRAMS, "tandem serve")
    shared = flags(runtime_dir=runtime_dir, log_format=log_format)
    door = flags(
        tokens=tokens, tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, health_listen=health_listen
    )
    holds_pools = _holds_pools(shared_pool, device, standby)
    screen = _Screen(as_json=log_format == LogFormat.JSON)
    pair = ServicePair(
        scheduler_flags=[
            *flags(listen=listen, journal=journal, metrics_listen=metrics_listen),
            *door,
            *shared,
            *shlex.split(scheduler),
        ],
        worker_flags=[
            *flags(model=model, device=device, dtype=dtype, shared_pool=shared_pool.value if holds_pools else "off"),
            *shared,
            *shlex.split(worker),
        ],
        standbys=standby,
        holder_flags=shared if holds_pools else None,
        gateway_flags=_gateway_flags(http, gateway, log_format),
        on_line=screen.show_child,
        say=screen.say,
    )
    code, cause = asyncio.run(_serve(pair, screen.say))
    screen.close()
    if cause:
        _print_cause(cause, in_json=log_format == LogFormat.JSON)
    raise typer.Exit(code)


def _gateway_flags(http: str | None, more: str, log_format: LogFormat | None) -> list[str] | None:
    """None: no gateway."""
    if http is None:
        if more:
            raise typer.BadParameter("needs --http, the address of the gateway", param_hint="--gateway")
        return None
    return [*flags(listen=http, log_format=log_format), *shlex.split(more)]


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
            say("stopping now: all requests end")
            pair.stop_now()
            return
        say("stopping: new requests are refused, running ones may end; interrupt again to stop now")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    pair.start()
    announcing = asyncio.create_task(_announce(pair, say))
    try:
        await pair.guard(stop.wait())
    except ServiceEnded as end:
        if end.in_order:
            say("the service was drained; stopping")
            return Exit.OK, ""
        code = Exit.USAGE if end.wrong_settings else Exit.ERROR
        say(f"stopping all programs; tandem serve ends with exit code {code:d}")
        return code, str(end)
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
        say(f"ready: {await pair.command() or _command(address)}")
        await pair.down()


def _command(address: str) -> str:
    named = "" if address == DEFAULT_ADDRESS else f"--address {address} "
    return f'tandem generate {named}"Return the"'


async def _serves_toy(address: str) -> bool:
    try:
        async with Probe(address) as client:
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
        if READY.search(line) is None:
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
