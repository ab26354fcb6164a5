"""What a fleet is asked to be, and a worker of it on its node: its command, its resources, its process, its report.

Ray holds the worker as an actor, and would start its process again at once and for ever: here pauses grow, and a worker
that cannot serve is given up. Knows nothing of Ray. A fleet names the folder of the keys and never has a key.
"""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, Field

import gpu_worker
from gpu_worker.link.connection import HOW_TO_MAKE, check_address
from gpu_worker.settings import PROGRAM
from tandem_contract.child import Program, python
from tandem_contract.logs import may_have_cause
from tandem_contract.needed import NeededThread
from tandem_contract.plural import numbered
from tandem_contract.processes import Heard, Policy, State, Supervisor, run
from tandem_contract.settings import SettingError, number

_Resources = Mapping[str, float]
# Flags of the worker that the fleet sets.
_OWN_FLAGS = ("--connect", "--keys", "--exit-with-parent", "--ranks")
GRACE_SECONDS, _MAX_LINE = 30.0, 500
_FOLDER = str(Path(gpu_worker.__file__).parents[1])


class ClusterFailed(RuntimeError):
    """The cluster cannot do what was asked; the message says why and what helps."""


class Named(BaseModel):
    """The flags of all commands on a fleet."""

    address: str = Field("auto", title="HOST:PORT", description="the head; default: the cluster of this host")
    name: str = Field("tandem", title="NAME", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="of the fleet")


class Sized(Named):
    """The flags of `scale`."""

    workers: int = number(1, 1, 1024, "N", "how many workers there shall be")
    place_seconds: int = number(30, 1, 86_400, "S", "time for nodes with free resources")
    wait_seconds: int = number(600, 0, 86_400, "S", "time to watch until all workers serve")


class Fleet(Sized):
    """Equal workers under one name, as `up` is asked for them. A worker of several ranks is a group, on one node."""

    connect: str = Field("", title="ADDRESS", description="tcp://HOST:PORT of the scheduler")
    keys: str = Field("", title="FOLDER", description="folder with a worker's keys, at this path on each node")
    ranks: int = number(1, 1, 64, "N", "processes of one worker")
    gpus: int | None = number(None, 0, 64, "N", "GPUs of one worker; default: ranks, 0 with --device cpu")
    cpus: int | None = number(None, 1, 1024, "N", "CPUs of one worker; default: ranks")
    max_failures: int = number(20, 1, 10_000, "N", "failures in a row after which a worker is given up")
    module: str = Field("gpu_worker", title="MODULE", description="module to run")
    # Further flags of the worker.
    flags: tuple[str, ...] = ()

    def checked(self) -> "Fleet":
        """The fleet with the GPUs of a worker. Raises ValueError for what no worker can do."""
        for flag in _OWN_FLAGS:
            if any(word == flag or word.startswith(f"{flag}=") for word in self.flags):
                raise SettingError(f"{flag} is a flag of `up`; give it before the --")
        check_address(self.connect)
        if not PurePosixPath(self.keys).is_absolute():
            raise SettingError(
                f"keys is {self.keys}; it must be an absolute path, the same on each node; {HOW_TO_MAKE}"
            )
        device = PROGRAM.read(self.worker_flags(), {}).device if self.module == "gpu_worker" else ""
        if device not in ("", "cuda", "cpu"):
            raise SettingError(f"device is {device}; Ray gives each worker GPUs of its own, so it must be cuda or cpu")
        gpus = 0 if device == "cpu" else self.ranks
        return self if self.gpus is not None else self.model_copy(update={"gpus": gpus})

    def resources(self) -> dict[str, int]:
        """What one worker needs, all of its ranks together, on one node."""
        return {"CPU": self.cpus or self.ranks, "GPU": self.gpus or 0}

    def worker_flags(self) -> list[str]:
        """The flags of its process, which starts a process for each rank by itself if there are several."""
        ranks = ["--ranks", str(self.ranks)] if self.ranks > 1 else []
        return ["--connect", self.connect, "--keys", self.keys, "--exit-with-parent", *ranks, *self.flags]

    def command(self) -> tuple[str, ...]:
        return python(self.module, *self.worker_flags())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One worker. pid: 0 if no process runs. seconds: in this state. cause: why it last ended, or is not there."""

    number: int
    state: str
    host: str = ""
    pid: int = 0
    num_starts: int = 0
    seconds: float = 0.0
    cause: str = ""
    last_line: str = ""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        pid = f", pid {self.pid}" if self.pid else ""
        starts = f", start {self.num_starts}" if self.num_starts > 1 else ""
        about = self.cause or (self.last_line if self.state == State.STARTING else "")
        tail = f": {about}" if about else ""
        age = timedelta(seconds=round(self.seconds))
        return f"worker {self.number}{where}: {self.state} for {age}{pid}{starts}{tail}"


def policy(max_failures: int) -> Policy:
    """That of a worker: one that served for a minute was no failure of its settings, its model or its machine."""
    return Policy(
        first_pause_seconds=0.1, steady_seconds=60.0, steady_at_once=False, needs_service=False,
        each_alone=True, max_ends=max_failures, window_seconds=math.inf,
    )  # fmt: skip


class Worker:
    """One worker that is started again until `stop`, or until it is given up."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        """Its lines go to stderr, with its number."""
        self._fleet, self._number, self._last_line = fleet, number, ""
        paths = os.pathsep.join([_FOLDER, os.environ.get("PYTHONPATH", "")])
        program = Program(argv=fleet.command(), environment={"PYTHONPATH": paths})
        self._process = Supervisor(f"worker {number}", lambda: program, policy(fleet.max_failures), hear=self._hear)
        # The kernel ends the worker with the thread that started it, so this thread lives as long as this object.
        self._thread = NeededThread(target=lambda: run(self._process), name="supervisor")
        self._thread.start()

    def fleet(self) -> Fleet:
        return self._fleet

    def report(self) -> Report:
        process = self._process
        return Report(
            number=self._number,
            state=process.state,
            host=socket.gethostname(),
            pid=process.pid,
            num_starts=process.num_starts,
            seconds=time.monotonic() - process.since,
            cause="" if process.ended is None else process.ended.told[: 2 * _MAX_LINE],
            last_line=self._last_line,
        )

    def retry(self) -> bool:
        """Starts a worker that was given up. Returns whether it was."""
        return self._process.retry()

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Ends the worker: SIGTERM, on which its requests move to other workers, and SIGKILL after the grace."""
        self._process.stop(grace_seconds)
        self._thread.join()

    def _hear(self, line: str) -> Heard:
        line = line[:_MAX_LINE]
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._process.name}: {line}", file=sys.stderr, flush=True)
        if may_have_cause(line):
            self._last_line = line
        return Heard.SERVES if "joined the scheduler" in line else Heard.WORDS


def why_not_placed(placed: int, count: int, one: _Resources, nodes: Iterable[tuple[str, _Resources]]) -> str:
    """Why only `placed` of `count` workers found a node. nodes: the name and all resources of each, in use or not."""
    amounts = "{GPU:g} GPU and {CPU:g} CPU".format_map
    held = ", ".join(f"{name} has {amounts({'GPU': 0, 'CPU': 0, **free})}" for name, free in nodes) or "none is there"
    outcome = f"{placed} of {numbered(count, 'worker')} found {amounts(one)} free on a node; nodes: {held}"
    return f"{outcome}; add nodes, or place fewer; workers without a GPU need --device cpu"
