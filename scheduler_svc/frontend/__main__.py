"""The front end's process: its settings, logging, and its end together with its parent.

The scheduler service starts it, and gives it its settings in a pipe. Lines on stdout are for the parent: the address, a
sign of life every second, and the reason of a failure.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_svc.frontend.grpc_tuning import event_loop
from scheduler_svc.processes.frontends import ALIVE, FAILED, READY, FrontEndSettings
from scheduler_svc.recording import flight_files
from tandem_contract import logs, stopping
from tandem_contract.child import die_with_parent
from tandem_contract.logs import escaped
from tandem_contract.needed import ends_with_needed, needed_task

if TYPE_CHECKING:
    from scheduler_svc.frontend.chat.forms import AnswerForm

log = logging.getLogger("tandem.frontend")

# The parent replaces a front end that stops printing ALIVE.
ALIVE_SECONDS = 1.0


@ends_with_needed("frontend")
def main() -> int:
    """Serves until a stop is asked for, or the parent's end. Returns the exit code: 2 if another start cannot help."""
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        print("the scheduler service starts this program; its only argument is a pipe with settings", file=sys.stderr)
        return 0 if sys.argv[1:] == ["--help"] else 2
    stopping.begin()
    try:
        settings = _settings(int(sys.argv[1]))
        die_with_parent()
        if settings.grpc_tuning == "on":
            event_loop.use_one_heap()
        logs.start(settings.name, level=settings.log_level, log_format=settings.log_format, package="scheduler_svc")
        if settings.flight_dir is not None:
            flight_files.catch_fatal_signals(settings.flight_dir, settings.name)
        serve(settings)
    except CannotServeError as error:
        return _fail(str(error), 2)
    except Exception as error:
        log.exception("the front end failed")
        return _fail(f"{type(error).__name__}: {error}", 1)
    stopping.end()
    return 0


class CannotServeError(Exception):
    """This process can never serve with these settings or this address."""


def _settings(pipe: int) -> FrontEndSettings:
    """Reads the parent's pipe and closes it. Raises CannotServeError."""
    with open(pipe, "rb") as file:
        try:
            return FrontEndSettings.decoded(file.read())
        except (ValueError, TypeError) as error:
            raise CannotServeError(f"the settings are not those of this version: {error}") from None


def serve(settings: FrontEndSettings) -> None:
    """Serves until a stop is asked for. Raises CannotServeError if the address cannot be used."""
    # Silences gRPC's C library, which writes its own lines to stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Each thread processes one text at a time. The library reads this when the tokenizer is first used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from scheduler_svc.frontend.grpc_tuning import tuning
    from scheduler_svc.frontend.grpc_tuning.event_loop import FrontEndLoop
    from scheduler_svc.frontend.rpc.calls import is_not_of_a_lost_caller
    from scheduler_svc.frontend.server import FrontEnd
    from scheduler_svc.processes.address import ListenError

    for handler in logging.getLogger().handlers:
        handler.addFilter(is_not_of_a_lost_caller)
    tuned = tuning.find() if settings.grpc_tuning == "on" else tuning.OFF
    answers = read_answers(settings.response_template)

    async def run() -> None:
        front_end = FrontEnd(settings, tuning=tuned, answers=answers)
        front_end.stop_on_signals()
        alive = needed_task(say_alive(front_end.stop), "signs of life")
        await front_end.run(_print_address)
        alive.cancel()

    try:
        with asyncio.Runner(loop_factory=FrontEndLoop if tuned.wakeups else None) as runner:
            runner.run(run())
    except ListenError as error:
        raise CannotServeError(str(error)) from None


def read_answers(path: Path | None) -> "AnswerForm | None":
    """The operator's form of answers. Raises CannotServeError if the file cannot be used."""
    if path is None:
        return None
    from scheduler_svc.frontend.chat.forms import read_form

    try:
        return read_form(json.loads(path.read_text(encoding="utf-8-sig")), path.stem)
    except (OSError, ValueError, RecursionError) as error:
        raise CannotServeError(f"response_template {path} cannot be used: {error}") from None


def _print_address(address: str) -> None:
    # If the parent has died meanwhile, this process is about to be killed.
    with suppress(OSError):
        print(f"{READY}{address}", flush=True)


async def say_alive(on_lost_parent: Callable[[], None]) -> None:
    """Prints from the event loop, so a loop that hangs prints nothing. Calls `on_lost_parent` if printing fails."""
    try:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            print(ALIVE, flush=True)
    except OSError:
        on_lost_parent()


def _fail(reason: str, code: int) -> int:
    """Prints the reason for the parent, which logs it."""
    print(f"{FAILED}{escaped(reason)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
