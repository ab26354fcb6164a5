"""`tandem serve`: the scheduler service and one worker of a checkout, side by side in one terminal.

Owns the command's flags, its output and its exit code; `services.pair` owns the processes.
"""

import asyncio
import datetime
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from tandem_client.async_client import AsyncClient
from tandem_client.cli.reporting import Exit, fail
from tandem_client.connection import DEFAULT_ADDRESS
from tandem_client.errors import TandemError
from tandem_client.services.child import missing_programs
from tandem_client.services.line_writer import LineWriter
from tandem_client.services.pair import PROGRAMS, ServicePair
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.toy import TOY_NOTICE, is_toy

# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
# For a reader of standard output to take what is left.
_FLUSH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
# What a user may paste follows it.
_READY = "ready: tandem generate"


class LogFormat(StrEnum):
    """How the lines of all three processes look."""

    TEXT = "text"
    JSON = "json"


def serve(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"Address where the service listens; default: {DEFAULT_ADDRESS}."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled toy model.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: CUDA if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; default: by device.")] = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Folder of the sockets.")] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Lines for people, or one JSON object per line; default: text.")
    ] = None,
    scheduler: Annotated[str, typer.Option(help='More flags: "--reflection --max-waiting 64".')] = "",
    worker: Annotated[str, typer.Option(help='More flags: "--page-size 64".')] = "",
) -> None:
    """Run the scheduler service and a worker until Ctrl-C, and restart them when they die."""
    missing = missing_programs(PROGRAMS)
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise fail(
            f"{' and '.join(missing)} {are} not installed: this environment has only the client. Run tandem serve in a "
            "checkout"
        )
    shared = _flags(runtime_dir=runtime_dir, log_format=log_format)
    screen = _Screen(as_json=log_format == LogFormat.JSON)
    pair = ServicePair(
        scheduler_flags=[*_flags(listen=listen), *shared, *shlex.split(scheduler)],
        worker_flags=[*_flags(model=model, device=device, dtype=dtype), *shared, *shlex.split(worker)],
        scheduler_policy=RestartPolicy(),
        # The service goes on without a worker, and its health says why.
        worker_policy=RestartPolicy(max_ends=None),
        on_line=screen.show_child,
        say=screen.say,
    )
    code, cause = asyncio.run(_serve(pair, screen.say))
    screen.close()
    if cause:
        _print_cause(cause)
    raise typer.Exit(code)


def _flags(**values: str | None) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


async def _serve(pair: ServicePair, say: Callable[[str], None]) -> tuple[Exit, str]:
    """Serves until a signal comes or a process is given up; the exit code and the cause, if there is one."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            say("stopping at once")
            pair.kill()
            return
        say("stopping; once more to stop at once")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    pair.start()
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(pair.failed())
    announcing = asyncio.create_task(_announce(pair, say))
    await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, announcing):
        task.cancel()
    if failing.done():
        failure = failing.result()
        await pair.stop(_STOP_SECONDS)
        return (Exit.USAGE if failure.wrong_settings else Exit.ERROR), failure.message
    failing.cancel()
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


def _print_cause(cause: str) -> None:
    # Standard error may be as blocked as standard output was.
    writer = LineWriter(sys.stderr)
    writer.write(f"error: {cause}")
    writer.close(_FLUSH_SECONDS)


class _Screen:
    """Standard output: the children's lines, each with its program's name before it, and this command's own."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._writer = LineWriter(sys.stdout)

    def show_child(self, name: str, line: str) -> None:
        """Prints one line of a child. Its own `ready` is left out: this command's comes once both serve."""
        if _READY not in line:
            self._show(name, line)

    def say(self, line: str) -> None:
        """Prints one line of this command."""
        self._show("serve", line)

    def _show(self, name: str, line: str) -> None:
        # An object of a JSON log names its process itself.
        if not self._as_json:
            self._writer.write(f"{name:>9} | {line}")
        elif line.startswith("{"):
            self._writer.write(line)
        else:
            self._writer.write(_json_line(name, line))

    def close(self) -> None:
        """Waits a moment for what is not written yet."""
        self._writer.close(_FLUSH_SECONDS)


def _json_line(name: str, message: str) -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    record = {"time": now, "process": name, "pid": os.getpid(), "level": "INFO", "message": message}
    return json.dumps(record, ensure_ascii=False)
