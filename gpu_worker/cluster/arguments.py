"""The command line of `python -m gpu_worker.cluster`: its flags, its help and the checks that need no cluster."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import NoReturn

from gpu_worker.cluster.fleet import (
    MAX_WORKERS,
    WORKER_MODULE,
    Fleet,
    FleetRefused,
    check_name,
    gpus_of,
    refuse_own_flags,
)
from gpu_worker.link.remote import HOW_TO_MAKE, check_address
from gpu_worker.settings import PROGRAM
from tandem_contract.settings import SettingError

DEFAULT_PORT = 6379
_DESCRIPTION = """\
Place workers on the machines of a Ray cluster. Ray starts their processes, and starts them again on a node
that is left; plans, tokens, weights and keys never pass through it."""
_EPILOG = """\
Each node needs Tandem with the extras worker and ray, the model, and a folder of keys at the same path (`tandem keys`).
Run these commands on a node of the cluster.

Examples:
  python -m gpu_worker.cluster head
  python -m gpu_worker.cluster up --workers 4 --connect tcp://scheduler:50060 --keys /etc/tandem/gpu \\
      -- --model /models/Qwen3-0.6B --device cuda
  python -m gpu_worker.cluster status
  python -m gpu_worker.cluster scale 6
  python -m gpu_worker.cluster down
"""


class _Parser(argparse.ArgumentParser):
    """Raises FleetRefused instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise FleetRefused(f"{message}; --help lists the flags")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command and its flags; those of the worker, after --, as `worker_flags`. Raises FleetRefused."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    parsed = _parser().parse_args(given[:place])
    parsed.worker_flags = given[place + 1 :]
    if parsed.worker_flags and parsed.command != "up":
        raise FleetRefused(f"{parsed.command} takes no flags of the worker after --")
    if "name" in parsed:
        check_name(parsed.name)
    return parsed


def fleet_of_flags(parsed: argparse.Namespace) -> Fleet:
    """The fleet that `up` is asked for. Raises FleetRefused."""
    flags = tuple(parsed.worker_flags)
    refuse_own_flags(flags)
    try:
        check_address(parsed.connect)
    except ValueError as error:
        raise FleetRefused(str(error)) from None
    if not PurePosixPath(parsed.keys).is_absolute():
        raise FleetRefused(f"keys is {parsed.keys}; it must be an absolute path, the same on each node; {HOW_TO_MAKE}")
    gpus = gpus_of(flags, parsed.ranks) if parsed.gpus is None else parsed.gpus
    fleet = Fleet(
        name=parsed.name,
        connect=parsed.connect,
        keys=parsed.keys,
        flags=flags,
        ranks=parsed.ranks,
        gpus=gpus,
        cpus=parsed.cpus or parsed.ranks,
        max_failures=parsed.max_failures,
        module=parsed.module,
    )
    if fleet.module == WORKER_MODULE:
        try:
            PROGRAM.read(fleet.worker_flags(), os.environ)
        except SettingError as error:
            raise FleetRefused(f"the worker's settings: {'; '.join(str(error).splitlines())}") from None
    return fleet


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m gpu_worker.cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    shared = _Parser(add_help=False, allow_abbrev=False)
    shared.add_argument("--address", default="auto", help="HOST:PORT of the head; default: the cluster of this host")
    shared.add_argument("--name", default="tandem", help="name of the fleet; default: tandem")
    head = commands.add_parser("head", help="start a cluster with this host as its head", allow_abbrev=False)
    head.add_argument("--port", type=_number(1, 65535), default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}")
    _add_up(commands.add_parser("up", parents=[shared], help="place workers", allow_abbrev=False))
    status = commands.add_parser("status", parents=[shared], help="show each worker", allow_abbrev=False)
    status.add_argument("--json", action="store_true", help="print one JSON object per worker")
    scale = commands.add_parser("scale", parents=[shared], help="change the number of workers", allow_abbrev=False)
    scale.add_argument("workers", metavar="N", type=_number(1, MAX_WORKERS), help="how many workers there shall be")
    _add_waits(scale)
    commands.add_parser("retry", parents=[shared], help="start those again that were given up", allow_abbrev=False)
    commands.add_parser("down", parents=[shared], help="end all workers of the fleet", allow_abbrev=False)
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    up.usage = "python -m gpu_worker.cluster up [flags] -- [flags of the worker]"
    up.add_argument("--workers", metavar="N", type=_number(1, MAX_WORKERS), default=1, help="default: 1")
    up.add_argument("--connect", metavar="ADDRESS", required=True, help="tcp://HOST:PORT of the scheduler")
    up.add_argument("--keys", metavar="FOLDER", required=True, help="folder with a worker's keys, on each node")
    up.add_argument("--ranks", metavar="N", type=_number(1, 64), default=1, help="processes of one worker; default: 1")
    up.add_argument(
        "--gpus", metavar="N", type=_number(0, 64), help="GPUs of one worker; default: ranks, 0 with --device cpu"
    )
    up.add_argument("--cpus", metavar="N", type=_number(1, 1024), help="CPUs of one worker; default: ranks")
    up.add_argument(
        "--max-failures",
        metavar="N",
        type=_number(1, 10_000),
        default=20,
        help="failures in a row after which a worker is given up; default: 20",
    )
    up.add_argument("--module", default=WORKER_MODULE, help=f"module to run; default: {WORKER_MODULE}")
    _add_waits(up)


def _add_waits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--place-seconds",
        metavar="S",
        type=_number(1, 86_400),
        default=30,
        help="time for nodes with free resources; default: 30",
    )
    parser.add_argument(
        "--wait-seconds",
        metavar="S",
        type=_number(0, 86_400),
        default=600,
        help="time to watch until all workers serve; default: 600",
    )


def _number(least: int, most: int) -> Callable[[str], int]:
    """A whole number within limits, for argparse."""

    def read(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"is {text}; it must be a whole number from {least} to {most}")
        return value

    return read
