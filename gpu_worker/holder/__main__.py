"""`python -m gpu_worker.holder`: the holder of shared pools as a process, until a signal.

Owns its flags, its limit and its exit code. Imports no torch: it must cost little memory and start at once.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from gpu_worker.holder.pools import Pools
from gpu_worker.holder.server import Holder, HolderRuns
from gpu_worker.process.cgroups import CGROUPS, PROC, memory_groups
from tandem_contract import logs
from tandem_contract.child import die_with_parent
from tandem_contract.files import default_runtime_dir, own_runtime_dir
from tandem_contract.logs import LogFormat
from tandem_contract.settings import SHARED, Program, SettingError, Size, file, refused

log = logging.getLogger("gpu_worker.holder")

# Of the memory that this process may have, if no limit is set. The worker's own check of free memory is stricter.
_SHARE_OF_MEMORY = 0.8


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 after a signal, 1 if another holder serves or the folder is wrong, 2 for flags."""
    logs.open_closed_streams()
    try:
        settings = PROGRAM.read(arguments, os.environ)
    except SettingError as error:
        return refused("holder", error)
    if settings.exit_with_parent:
        die_with_parent()
    logs.start("holder", level="info", log_format=settings.log_format, package="gpu_worker")
    try:
        return _serve(settings)
    finally:
        logs.stop()


def _serve(settings: "HolderSettings") -> int:
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


def default_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the limit of a holder that was given none."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE_OF_MEMORY * min([machine, *(group.limit for group in memory_groups(proc, cgroups))]))


class HolderSettings(BaseModel):
    """All settings of `python -m gpu_worker.holder`."""

    runtime_dir: Path = Field(
        default_factory=default_runtime_dir,
        title="FOLDER",
        description="folder of the sockets; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>",
    )
    max_bytes: Annotated[Size, Field(ge=1)] = Field(
        default_factory=default_limit,
        title="SIZE",
        description="limit of host memory, such as 4GiB; default: most of what it may have",
    )
    exit_with_parent: bool = Field(False, description="end when the process that started this one ends; default: no")
    log_format: LogFormat = Field("text", title="FORMAT", description="text, or json for one JSON object per line")
    config: Path | None = file("TOML file with any of these settings")


PROGRAM = Program(
    command="python -m gpu_worker.holder",
    model=HolderSettings,
    description="Keeps the KV pools of workers.",
    prefix="TANDEM_HOLDER_",
    # The folder of the worker's settings.
    shared={"runtime_dir": ("TANDEM_WORKER_RUNTIME_DIR", *SHARED["runtime_dir"]), "log_format": SHARED["log_format"]},
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
