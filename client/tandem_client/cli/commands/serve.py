"""`tandem serve`: the scheduler service and the workers of a checkout, side by side in one terminal.

Owns the command's flags, its output and its exit code; `services.pair` owns the processes. Lines are written in a
thread, so that output which is not read blocks nothing else.
"""

import asyncio
import os
import select
import shlex
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import typer

from tandem_client.cli.flags import flag, takes
from tandem_client.cli.reporting import Exit, require_programs
from tandem_client.connection import DEFAULT_ADDRESS
from tandem_client.errors import TandemError
from tandem_client.services.pair import READY, TOY_NOTICE, ServicePair, flags, is_toy
from tandem_client.services.probe import Probe
from tandem_client.services.programs import PROGRAMS
from tandem_contract import stopping
from tandem_contract.logs import LogFormat, as_json
from tandem_contract.processes import ServiceEnded
from tandem_contract.stopping import Asked, StopRequests

_MAX_LINES = 4096

# Whether the KV pool of a worker outlives it.
SharedPool = Literal["auto", "on", "off"]
# Each takes the memory of another model.
MAX_STANDBYS = 8

# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
# The time for a reader of standard output to take the last lines.
_FLUSH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
# Says in brackets whether shared memory gets huge pages.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class LineWriter:
    """Writes lines in order to the descriptor of a stream. `None` is a closed standard stream; lines to it are lost.

    When the queue is full, lines are dropped and counted. After a write error the descriptor is not used again.
    """

    def __init__(
        self, stream: TextIO | None, *, max_lines: int = _MAX_LINES, own_line: Callable[[str], str] = str
    ) -> None:
        """`own_line` gives the writer's own message about dropped lines the form of the other lines."""
        self._descriptor = None if stream is None else stream.fileno()
        self._max_lines = max_lines
        self._own_line = own_line
        self._lines: deque[str] = deque()
        self._num_dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        # A daemon, so that a blocked write does not keep this process alive.
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queues one line; never waits."""
        with self._changed:
            if len(self._lines) < self._max_lines:
                self._lines.append(line)
            else:
                self._num_dropped += 1
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Waits, at most `timeout` seconds, until every queued line is written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while text := self._next_text():
            try:
                self._write_all(text.encode(errors="replace"))
            except OSError:
                # The reader has closed the stream.
                self._descriptor = None

    def _next_text(self) -> str:
        """Waits for lines and returns all of them; returns "" if the writer closes and no line is left."""
        with self._changed:
            while not self._lines and not self._closing:
                self._changed.wait()
            lines = list(self._lines)
            self._lines.clear()
            if self._num_dropped:
                dropped = f"{self._num_dropped} lines were dropped because the output was not read in time"
                lines.append(self._own_line(dropped))
                self._num_dropped = 0
        return "".join(f"{line}\n" for line in lines)

    def _write_all(self, data: bytes) -> None:
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])


_flag = partial(flag, None)
_PARAMETERS = (
    _flag(str, "--listen HOST:PORT", f"Address where the service listens; default: {DEFAULT_ADDRESS}."),
    _flag(
        str,
        "--http HOST:PORT",
        "Address of the OpenAI-compatible HTTP gateway, with the certificate of --tls-cert; default: none.",
    ),
    _flag(str, "--model", "A folder or a hub name; default: the bundled toy model."),
    _flag(str, "--device", "cpu, cuda or cuda:N; default: CUDA if there is one."),
    _flag(str, "--dtype", "float32, bfloat16 or float16; default: the device decides."),
    _flag(str, "--runtime-dir", "Folder of the sockets of the service."),
    _flag(str, "--journal DIR", "Folder of a journal: streams with resume survive the scheduler's death."),
    _flag(str, "--metrics-listen HOST:PORT", "Address of the Prometheus page /metrics; default: none."),
    _flag(str, "--tokens FILE", "Tenants and hashes of their tokens."),
    _flag(str, "--tls-cert FILE", "Certificate chain, PEM: TLS."),
    _flag(str, "--tls-key FILE", "Key of --tls-cert, PEM."),
    _flag(str, "--tls-client-ca FILE", "Clients need a certificate of this authority."),
    _flag(str, "--health-listen HOST:PORT", "Second address for health alone, in plaintext."),
    _flag(
        LogFormat,
        "--log-format",
        "Log lines as text, or one JSON object per line; default: text.",
        envvar="TANDEM_LOG_FORMAT",
    ),
    _flag(str, "--scheduler", 'More flags of the scheduler service, such as "--reflection --max-waiting 64".', ""),
    _flag(str, "--worker", 'More flags of the worker, such as "--page-size 64".', ""),
    _flag(str, "--gateway", 'More flags of the gateway, such as "--processes 4".', ""),
    _flag(
        int, "--standby N", "Warm workers that wait until the serving one dies; default: 0.", 0, min=0, max=MAX_STANDBYS
    ),
    _flag(
        SharedPool,
        "--shared-pool",
        "Keep the KV pool of a worker when it dies; auto: with --standby, and on a CPU where shared memory has"
        " huge pages.",
        "auto",
    ),
)


@takes(_PARAMETERS)
def serve(
    *,
    http: str | None,
    device: str | None,
    scheduler: str,
    worker: str,
    gateway: str,
    standby: int,
    shared_pool: SharedPool,
    log_format: LogFormat | None,
    **options: str | None,
) -> None:
    """Run the scheduler service and a worker until Ctrl-C, and restart them when they die."""
    stopping.begin()
    require_programs(PROGRAMS, "tandem serve")
    model, dtype, runtime_dir = (options.pop(name) for name in ("model", "dtype", "runtime_dir"))
    shared = flags(runtime_dir=runtime_dir, log_format=log_format)
    holds_pools = _holds_pools(shared_pool, device, standby)
    formed = partial(_formed, log_format)
    # The lines of the children and of this command, each with the name of its program before it.
    output = LineWriter(sys.stdout, own_line=partial(formed, "serve"))

    def show(name: str, line: str) -> None:
        # Not a child's `ready` line: this command prints one when both serve.
        if READY.search(line) is None:
            output.write(formed(name, line))

    def say(line: str) -> None:
        output.write(formed("serve", line))

    pooled = flags(model=model, device=device, dtype=dtype, shared_pool=shared_pool if holds_pools else "off")
    pair = ServicePair(
        # The other options are the scheduler's own.
        scheduler_flags=[*flags(**options), *shared, *shlex.split(scheduler)],
        worker_flags=[*pooled, *shared, *shlex.split(worker)],
        standbys=standby,
        holder_flags=shared if holds_pools else None,
        gateway_flags=_gateway_flags(http, gateway, log_format),
        on_line=show,
        say=say,
    )
    code, cause = asyncio.run(_serve(pair, say))
    output.close(_FLUSH_SECONDS)
    if cause:
        # Standard error may be as blocked as standard output was.
        errors, line = LineWriter(sys.stderr), f"error: {cause}"
        errors.write(as_json("serve", line, level="ERROR") if log_format == "json" else line)
        errors.close(_FLUSH_SECONDS)
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
    if shared_pool != "auto":
        return shared_pool == "on"
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
    stop, requests = asyncio.Event(), StopRequests()

    def on_signal() -> None:
        if requests.announce():
            say("stopping: new requests are refused, running ones may end; Ctrl-C or SIGTERM again ends them at once")
            stop.set()
        elif requests.asked == Asked.STOP_NOW:
            say("stopping now: all requests end")
            pair.stop_now()

    requests.listen_in(asyncio.get_running_loop(), on_signal)
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
        for line in await pair.stop(_STOP_SECONDS):
            say(line)
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


def _formed(log_format: LogFormat | None, name: str, line: str) -> str:
    # A line of a JSON log already names its process.
    return as_json(name, line) if log_format == "json" else f"{name:>9} | {line}"
