"""The front end's process: flags, logging, and its end together with its parent.

The scheduler service starts it and owns the settings, so the flags are not a public interface. Lines on stdout are for
the parent: the address, a sign of life every second, and the reason of a failure.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from scheduler_svc.frontend.grpc_tuning import memory
from scheduler_svc.processes.frontends import ALIVE, FAILED, READY
from scheduler_svc.recording.flight import folder
from tandem_contract import logs
from tandem_contract.log_lines import escaped
from tandem_contract.parent import die_with_parent

if TYPE_CHECKING:
    from scheduler_svc.frontend.chat.forms import AnswerForm

log = logging.getLogger("tandem.frontend")

# The parent replaces a front end that stops printing ALIVE.
ALIVE_SECONDS = 1.0
_SECRET_BYTES = 32


def main() -> int:
    """Serves until SIGTERM or the parent's end. Returns the exit code: 2 if another start cannot help."""
    try:
        flags = parse_flags(sys.argv[1:])
        die_with_parent()
        if flags.grpc_tuning == "on":
            memory.use_one_heap()
        logs.start(flags.name, level=flags.log_level, log_format=flags.log_format, package="scheduler_svc")
        if flags.flight_dir is not None:
            folder.catch_fatal_signals(flags.flight_dir, flags.name)
        serve(flags)
    except CannotServeError as error:
        return _fail(str(error), 2)
    except Exception as error:
        log.exception("the front end failed")
        return _fail(f"{type(error).__name__}: {error}", 1)
    return 0


class CannotServeError(Exception):
    """This process can never serve with these flags or this address."""


def serve(flags: argparse.Namespace) -> None:
    """Serves until SIGTERM. Raises CannotServeError if the address cannot be used."""
    # Silences gRPC's C library, which writes its own lines to stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Each thread processes one text at a time. The library reads this when the tokenizer is first used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from scheduler_svc.door.tls_files import TlsFiles
    from scheduler_svc.frontend.front_end_settings import FrontEndSettings
    from scheduler_svc.frontend.grpc_tuning import tuning
    from scheduler_svc.frontend.grpc_tuning.event_loop import FrontEndLoop
    from scheduler_svc.frontend.rpc.calls import is_not_of_a_lost_caller
    from scheduler_svc.frontend.server import FrontEnd
    from scheduler_svc.frontend.streaming.limits import StreamLimits
    from scheduler_svc.processes.address import ListenError

    for handler in logging.getLogger().handlers:
        handler.addFilter(is_not_of_a_lost_caller)
    tls = None
    if flags.tls_cert is not None:
        tls = TlsFiles(certificate=flags.tls_cert, key=flags.tls_key, client_ca=flags.tls_client_ca)
    settings = FrontEndSettings(
        endpoint=flags.endpoint,
        secret=read_secret(flags.secret_fd),
        listen=flags.listen,
        share_port=flags.share_port,
        reflection=flags.reflection,
        max_message_bytes=flags.max_message_bytes,
        grace_seconds=flags.grace_seconds,
        needs_tokens=flags.needs_tokens,
        tls=tls,
        health_listen=flags.health_listen,
        measures=flags.metrics,
        log_requests=flags.log_requests,
        tuning=tuning.find() if flags.grpc_tuning == "on" else tuning.OFF,
        answers=read_answers(flags.response_template),
        stream_limits=StreamLimits(max_streams=flags.max_streams),
    )

    async def run() -> None:
        front_end = FrontEnd(settings)
        front_end.stop_on_signals()
        alive = asyncio.create_task(say_alive(front_end.stop))
        await front_end.run(_print_address)
        alive.cancel()

    try:
        with asyncio.Runner(loop_factory=FrontEndLoop if settings.tuning.wakeups else None) as runner:
            runner.run(run())
    except ListenError as error:
        raise CannotServeError(str(error)) from None


def read_answers(path: Path | None) -> "AnswerForm | None":
    """The operator's form of answers. Raises CannotServeError if the file cannot be used."""
    if path is None:
        return None
    from scheduler_svc.frontend.chat.forms import read_form

    try:
        return read_form(json.loads(path.read_text(encoding="utf-8")), path.stem)
    except (OSError, ValueError) as error:
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


def read_secret(descriptor: int | None) -> bytes:
    """Reads 32 bytes from the parent's pipe and closes it. Empty without a pipe; no core accepts that."""
    if descriptor is None:
        return b""
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read(_SECRET_BYTES)


def _fail(reason: str, code: int) -> int:
    """Prints the reason for the parent, which logs it."""
    print(f"{FAILED}{escaped(reason)}", flush=True)
    return code


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CannotServeError(message)


def parse_flags(words: list[str]) -> argparse.Namespace:
    """Parses the parent's flags. Raises CannotServeError."""
    parser = _FlagParser(prog="python -m scheduler_svc.frontend", allow_abbrev=False)
    parser.add_argument("--endpoint", required=True, help="the core's socket, ipc://...")
    parser.add_argument("--secret-fd", type=int, metavar="N", help="a pipe with the secret that the core expects")
    parser.add_argument("--name", default="frontend", help="name of this front end in log lines")
    parser.add_argument("--listen", default="127.0.0.1:50051")
    parser.add_argument("--share-port", action="store_true", help="share the port with other front ends")
    parser.add_argument("--needs-tokens", action="store_true", help="the core sends the tokens of callers")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--tls-client-ca", type=Path)
    parser.add_argument("--health-listen", default="", help="address of the health service alone")
    parser.add_argument("--metrics", action="store_true", help="measure requests, and report to the core")
    parser.add_argument("--reflection", action="store_true")
    parser.add_argument("--max-message-bytes", type=int, default=4 * 1024 * 1024)
    parser.add_argument("--max-streams", type=int, default=8192)
    parser.add_argument("--grace-seconds", type=float, default=30.0)
    parser.add_argument("--log-level", default="info", type=str.lower, choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    parser.add_argument("--flight-dir", type=Path, help="folder for the stacks at a fatal signal")
    parser.add_argument("--response-template", type=Path, help="how answers of chats are parsed")
    parser.add_argument("--grpc-tuning", default="on", choices=("on", "off"), help="use private parts of gRPC")
    parser.add_argument("--log-requests", default="on", choices=("on", "off", "address"))
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
