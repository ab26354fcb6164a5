"""`python -m gpu_worker.holder`: the holder of shared pools as a process, until a signal.

Owns its flags, its limit and its exit code. Imports no torch: it must cost little memory and start at once.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from gpu_worker.holder.pools import Pools
from gpu_worker.holder.server import Holder, HolderRuns
from gpu_worker.process.cgroups import CGROUPS, PROC, memory_groups
from gpu_worker.settings import ENV_PREFIX, SHARED_PREFIX
from tandem_contract import logs
from tandem_contract.parent import die_with_parent
from tandem_contract.runtime_dir import default_runtime_dir, own_runtime_dir

log = logging.getLogger("gpu_worker.holder")

# Of the memory that this process may have, if no limit is set. The worker's own check of free memory is stricter.
_SHARE_OF_MEMORY = 0.8


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 after a signal, 1 if another holder serves or the folder is wrong, 2 for flags."""
    logs.open_closed_streams()
    settings = _parse(arguments)
    if settings.exit_with_parent:
        die_with_parent()
    logs.start("holder", level="info", log_format=settings.log_format, package="gpu_worker")
    try:
        return _serve(settings)
    finally:
        logs.stop()


def _serve(settings: argparse.Namespace) -> int:
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    try:
        own_runtime_dir(settings.runtime_dir)
        holder = Holder(settings.runtime_dir, Pools(settings.max_bytes), say=lambda line: log.info("%s", line))
    except (HolderRuns, ValueError, OSError) as error:
        log.error("%s", error)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: holder.stop())
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    log.info("holds pools of at most %d MiB for the workers of %s", settings.max_bytes >> 20, settings.runtime_dir)
    holder.serve(wake)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_worker.holder", description="Keeps the KV pools of workers.")
    parser.add_argument("--runtime-dir", type=Path, default=_runtime_dir(), help="folder of the sockets")
    parser.add_argument("--max-bytes", type=_size, default=default_limit(), help="limit of host memory, such as 4GiB")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when the parent process ends")
    parser.add_argument("--log-format", choices=("text", "json"), default=os.environ.get("TANDEM_LOG_FORMAT") or "text")
    return parser.parse_args(arguments)


def _runtime_dir() -> Path:
    """The folder of the worker's settings: its own variable, the one of all programs, the default."""
    names = f"{ENV_PREFIX}RUNTIME_DIR", f"{SHARED_PREFIX}RUNTIME_DIR"
    return next((Path(value) for name in names if (value := os.environ.get(name))), default_runtime_dir())


def _size(text: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size, such as 4GiB")
    return size


def default_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the limit of a holder that was given none."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE_OF_MEMORY * min([machine, *(group.limit for group in memory_groups(proc, cgroups))]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
