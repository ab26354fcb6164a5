"""The launcher of a group: starts the ranks of this host, and starts them again if the group is lost.

Owns what follows the end of a rank. All ranks of this host end with the first that fails; a refused start ends the
launcher with the exit code of the rank that refused; anything else is a loss, after which the group starts again. In a
group on several hosts each has a launcher; one that is left waits until the others are back (`meeting.py`).
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker.group.hosts import Meeting, interface_of
from gpu_worker.group.words import GROUP_LOST, REFUSED_CODES, STORE_VARIABLE
from gpu_worker.process.ranks import RUN_VARIABLE
from tandem_contract.child import Child, Program, python
from tandem_contract.processes import (
    NOT_STARTED_WORDS,
    Heard,
    OnZero,
    Policy,
    ServiceEnded,
    State,
    Supervisor,
    run_async,
)

if TYPE_CHECKING:
    from gpu_worker.group.meeting import Place

log = logging.getLogger(__name__)

# For ranks that are told to end.
_STOP_SECONDS = 5.0
# It does not know when they serve.
_POLICY = Policy(
    first_pause_seconds=0.1, steady_seconds=60.0, steady_from_start=True, steady_at_once=False,
    on_zero=OnZero.WANTED, needs_service=False, each_alone=True, final=frozenset(REFUSED_CODES),
)  # fmt: skip
_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"
# As torchrun sets them.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", _CPP_LEVEL: "WARNING"}


def launch(size: int, arguments: Sequence[str], meeting: Meeting, program: str = "gpu_worker") -> int:
    """Runs `python -m PROGRAM ARGUMENTS` as this host's part of `size` ranks until they end in order.

    Returns the exit code. Raises OSError if the system cannot start them.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-group-") as folder:
        return asyncio.run(_run(ranks_of_host(size, python(program, *arguments), meeting, folder)))


async def _run(supervisor: Supervisor) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop, _STOP_SECONDS)
    try:
        await run_async(supervisor)
    except ServiceEnded as error:
        assert supervisor.ended is not None, "the ranks have ended"
        if supervisor.ended.how == NOT_STARTED_WORDS:
            raise OSError(str(error)) from error
        return supervisor.ended.status
    return 0


def ranks_of_host(size: int, argv: tuple[str, ...], meeting: Meeting, folder: str) -> Supervisor:
    """Keeps this host's ranks running. folder: of this user alone, where the ranks of one host find each other."""
    environment = {name: value for name, value in _defaults(meeting).items() if name not in os.environ}
    environment[RUN_VARIABLE] = meeting.run_id
    place = _place(size, meeting, folder, on_met=lambda: supervisor.hurry())

    def program() -> Program | None:
        found = place.variables()
        return None if found is None else Program(argv=argv, environment=environment | found, takes_stderr=False)

    def start(program: Program, wake: Callable[[], None]) -> _Ranks:
        ranks = _Ranks(program, wake)
        place.watch(ranks.lose)
        return ranks

    name = f"group of {size} ranks"
    supervisor = Supervisor(name, program, _POLICY, hear=_hear, on_change=_on_change, start=start)
    return supervisor


def _place(size: int, meeting: Meeting, folder: str, on_met: Callable[[], None]) -> "_Alone | Place":
    if meeting.num_hosts == 1:
        return _Alone(size, folder)
    # Torch writes a stack for each lost connection.
    os.environ.setdefault(_CPP_LEVEL, "ERROR")
    from gpu_worker.group.meeting import Place

    return Place(meeting, size // meeting.num_hosts, on_met)


def _defaults(meeting: Meeting) -> dict[str, str]:
    if meeting.num_hosts == 1:
        # Ranks of one host need no port that others reach.
        return _DEFAULTS | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # Without it gloo takes the address that the host's own name means, often a loopback address.
    interface = interface_of(meeting.address)
    return _DEFAULTS | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def _hear(line: str) -> Heard:
    with suppress(OSError, ValueError):
        print(line, file=sys.stdout, flush=True)
    return Heard.WORDS


def _on_change(group: Supervisor) -> None:
    if group.state == State.PAUSED:
        log.warning("%s", group.ended)


class _Alone:
    """As `meeting.Place`, where all ranks are on this host. They find each other in files of this user.

    Torch's stores would listen on all interfaces.
    """

    def __init__(self, size: int, folder: str) -> None:
        self._size, self._folder, self._num_starts = str(size), folder, 0

    def variables(self) -> dict[str, str]:
        """As `Place`."""
        # A file serves for one start.
        self._num_starts += 1
        store = f"{self._folder}/ranks-{self._num_starts}"
        return {"RANK": "0", "WORLD_SIZE": self._size, "LOCAL_WORLD_SIZE": self._size, STORE_VARIABLE: store}

    def watch(self, on_waiting: Callable[[], None]) -> None:
        """As `Place`. No other host waits."""


class _Ranks:
    """One start of this host's ranks, as the one process that a supervisor keeps."""

    def __init__(self, program: Program, wake: Callable[[], None]) -> None:
        """Starts them, in the environment of the program, whose RANK is that of the first. Raises OSError."""
        self._first = int(program.environment["RANK"])
        self._children: list[Child] = []
        self._is_lost = False
        self.end: int | None = None
        try:
            for local_rank in range(int(program.environment["LOCAL_WORLD_SIZE"])):
                own = {"RANK": str(self._first + local_rank), "LOCAL_RANK": str(local_rank)}
                self._children.append(Child(replace(program, environment={**program.environment, **own}), wake))
        except OSError:
            self.kill()
            raise
        self.pid = self._children[0].pid

    def take(self) -> list[str]:
        """As `Child`."""
        lines = [line for child in self._children for line in child.take()]
        ends = [child.end for child in self._children]
        if any(ends) and not self._is_lost:
            self.lose()
        if None not in ends:
            refused = [end for end in ends if end in REFUSED_CODES]
            self.end = refused[0] if refused else GROUP_LOST if any(ends) else 0
            self._tell_signals()
        return lines

    def lose(self) -> None:
        """Ends all, because a rank of the group is lost. Any thread may call it."""
        self._is_lost = True
        for child in self._children:
            child.signal(signal.SIGTERM)
        late = threading.Timer(_STOP_SECONDS, self.kill)
        late.daemon = True
        late.start()

    def signal(self, number: signal.Signals) -> None:
        """To the leader, which ends the group in order; to all if it is on another host."""
        for child in self._children[:1] if self._first == 0 else self._children:
            child.signal(number)

    def kill(self) -> None:
        """As `Child`."""
        for child in self._children:
            child.kill()

    def how_it_ended(self) -> str:
        """As `Child`."""
        return "is lost" if self.end == GROUP_LOST else f"ended with exit code {self.end}"

    def _tell_signals(self) -> None:
        # A rank that the kernel kills because memory ran out says nothing. The rest were sent SIGTERM.
        for rank, child in enumerate(self._children, self._first):
            if child.end is not None and child.end < 0 and child.end != -signal.SIGTERM:
                log.warning("rank %d %s", rank, child.how_it_ended())
