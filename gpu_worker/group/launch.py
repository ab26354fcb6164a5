"""The launcher of a group: starts the ranks of this host, and starts them again if the group is lost.

Owns what follows the end of a rank. All ranks of this host end with the first that fails; a refused start ends the
launcher with the exit code of the rank that refused; anything else is a loss, after which the group starts again. In a
group on several hosts each has a launcher; one that is left waits until the others are back (`meeting.py`).
"""

import asyncio
import fcntl
import ipaddress
import logging
import math
import os
import re
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpu_worker.group.failures import GROUP_LOST, REFUSED_CODES
from gpu_worker.link.connection import HOW_TO_MAKE
from gpu_worker.process.ranks import RUN_PREFIX, RUN_VARIABLE, Ranks
from gpu_worker.settings import WorkerSettings
from tandem_contract.child import Child, Program, python
from tandem_contract.plural import numbered
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
from tandem_contract.settings import SettingError
from tandem_contract.stopping import Asked, StopRequests, is_stop

log = logging.getLogger(__name__)

# It does not know when they serve.
_POLICY = Policy(
    first_pause_seconds=0.1, steady_seconds=60.0, steady_from_start=True, steady_at_once=False,
    on_zero=OnZero.WANTED, needs_service=False, each_alone=True, final=frozenset(REFUSED_CODES),
)  # fmt: skip
# Set by the launcher of a group on one host: the file in which its ranks find each other.
STORE_VARIABLE = "_TANDEM_RANKS"
_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"
# As torchrun sets them.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", _CPP_LEVEL: "WARNING"}
_ENDPOINT = re.compile(r"(?P<host>[^\s:/\[\]]+):(?P<port>\d{1,5})")
# Linux: the IPv4 address of an interface; the length of struct ifreq, and where in it the address is.
_SIOCGIFADDR, _IFREQ_BYTES, _ADDRESS_AT = 0x8915, 256, slice(20, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the launchers of a group meet (torchrun calls it the rendezvous); by default one meets itself."""

    num_hosts: int = 1
    host: str = "localhost"
    port: int = 0
    run_id: str = field(default_factory=lambda: f"{RUN_PREFIX}{os.getpid()}")
    # The address of this host.
    address: str = "localhost"

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


def meeting_of(settings: WorkerSettings) -> Meeting:
    """The meeting that the settings describe. Raises SettingError."""
    if settings.nnodes == 1:
        return Meeting()
    matched = _ENDPOINT.fullmatch(settings.rdzv_endpoint)
    if matched is None or not 0 < int(matched["port"]) < 1 << 16:
        raise SettingError(
            f"rdzv_endpoint is {settings.rdzv_endpoint}; it must be HOST:PORT with a name or an IPv4 address, and a "
            "port from 1 to 65535"
        )
    host, port = matched["host"], int(matched["port"])
    address = settings.local_addr or _address_towards(host, port)
    _check_address(address, host)
    # What follows the dash is not the number of a process, unlike on one host.
    return Meeting(num_hosts=settings.nnodes, host=host, port=port, run_id=f"hosts-{settings.rdzv_id}", address=address)


def check_keys(settings: WorkerSettings, ranks: Ranks) -> None:
    """Raises SettingError for a rank without keys in a group on several hosts."""
    if ranks.spans_hosts and settings.keys is None:
        raise SettingError(
            f"ranks is {ranks.size}, {ranks.local_size} of them on this host, and keys is not set; between hosts the "
            f"ranks need keys: set connect and keys, {HOW_TO_MAKE}"
        )


def _address_towards(host: str, port: int) -> str:
    """This host's address on the way to that one; nothing is sent. Raises SettingError."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SettingError(f"rdzv_endpoint is {host}:{port}; there is no way to it: {error.strerror}") from error


def _check_address(address: str, meeting_host: str) -> None:
    """Raises SettingError for an address at which other hosts cannot reach this one."""
    try:
        is_loopback = ipaddress.IPv4Address(address).is_loopback
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except ValueError:
        raise SettingError(f"local_addr is {address}; it must be an IPv4 address of this host") from None
    except OSError as error:
        raise SettingError(f"local_addr is {address}; this host does not have it: {error.strerror}") from error
    if is_loopback and meeting_host != "localhost" and not meeting_host.startswith("127."):
        raise SettingError(
            f"this host's name {meeting_host} means {address} here, which no other host reaches; set local_addr to an "
            "address that they reach, or use it in rdzv_endpoint"
        )


def interface_of(address: str) -> str:
    """The name of this host's network interface with this first address; "" without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # It has no IPv4 address.
                continue
            if socket.inet_ntoa(answer[_ADDRESS_AT]) == address:
                return name
    return ""


def launch(size: int, arguments: Sequence[str], meeting: Meeting, program: str = "gpu_worker") -> int:
    """Runs `python -m PROGRAM ARGUMENTS` as this host's part of `size` ranks until they end in order.

    Returns the exit code. Raises OSError if the system cannot start them.
    """
    return asyncio.run(_run(ranks_of_host(size, python(program, *arguments), meeting)))


async def _run(supervisor: Supervisor) -> int:
    requests = StopRequests()

    def on_signal() -> None:
        if requests.announce():
            log.info("stopping: the leader ends the group in order; a second signal ends it at once")
            # The leader knows how long the scheduler needs it.
            supervisor.stop(math.inf)
        elif requests.asked == Asked.STOP_NOW:
            supervisor.kill()

    requests.listen_in(asyncio.get_running_loop(), on_signal)
    try:
        await run_async(supervisor)
    except ServiceEnded as error:
        assert supervisor.ended is not None, "the ranks have ended"
        if supervisor.ended.how == NOT_STARTED_WORDS:
            raise OSError(str(error)) from error
        return supervisor.ended.status
    return 0


def ranks_of_host(size: int, argv: tuple[str, ...], meeting: Meeting) -> Supervisor:
    """Keeps this host's ranks running."""
    environment = {name: value for name, value in _defaults(meeting).items() if name not in os.environ}
    environment[RUN_VARIABLE] = meeting.run_id
    alone = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    place = None
    if meeting.num_hosts > 1:
        from gpu_worker.group.meeting import Place

        place = Place(meeting, size // meeting.num_hosts, on_met=lambda: supervisor.hurry())

    def program() -> Program | None:
        variables = alone if place is None else place.variables()
        if variables is None:
            return None
        return Program(argv=argv, environment=environment | variables, takes_stderr=False, has_session=False)

    def start(program: Program, wake: Callable[[], None]) -> _Ranks:
        ranks = _Ranks(program, wake, has_store=place is None)
        if place is not None:
            place.watch(ranks.lose)
        return ranks

    name = f"group of {numbered(size, 'rank')}"
    supervisor = Supervisor(name, program, _POLICY, hear=_hear, on_change=_on_change, start=start)
    return supervisor


def _defaults(meeting: Meeting) -> dict[str, str]:
    if meeting.num_hosts == 1:
        # Ranks of one host need no port that others reach.
        return _DEFAULTS | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # Without it gloo takes the address that the host's own name means, often a loopback address.
    interface = interface_of(meeting.address)
    # Torch writes a stack for each lost connection.
    return _DEFAULTS | {_CPP_LEVEL: "ERROR"} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def _hear(line: str) -> Heard:
    with suppress(OSError, ValueError):
        print(line, file=sys.stdout, flush=True)
    return Heard.WORDS


def _on_change(group: Supervisor) -> None:
    if group.state == State.PAUSED:
        log.warning("%s", group.ended)


class _Ranks:
    """One start of this host's ranks, as the one process that a supervisor keeps."""

    def __init__(self, program: Program, wake: Callable[[], None], *, has_store: bool) -> None:
        """Starts them, in the environment of the program, with the RANK of the first. Raises OSError."""
        self._first = int(program.environment["RANK"])
        self._children: list[Child] = []
        self._is_lost = False
        self.end: int | None = None
        # Torch's other stores would listen on all interfaces. The folder is for this start alone, because a file serves
        # for one, and systemd removes what is old from /tmp.
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-group-", ignore_cleanup_errors=True)
        store = {STORE_VARIABLE: f"{self._folder.name}/ranks"} if has_store else {}
        try:
            for local_rank in range(int(program.environment["LOCAL_WORLD_SIZE"])):
                of_rank = {"RANK": str(self._first + local_rank), "LOCAL_RANK": str(local_rank)} | store
                self._children.append(Child(replace(program, environment={**program.environment, **of_rank}), wake))
        except OSError:
            self.kill()
            self._folder.cleanup()
            raise
        self.pid = self._children[0].pid

    def take(self) -> list[str]:
        lines = [line for child in self._children for line in child.take()]
        ends = [child.end for child in self._children]
        if any(ends) and not self._is_lost:
            for rank, child in enumerate(self._children, self._first):
                # A rank that the kernel kills because memory ran out says nothing.
                if child.end is not None and child.end < 0 and not is_stop(child.end):
                    log.warning("rank %d %s", rank, child.how_it_ended())
            self.lose()
        if None not in ends:
            refused = [end for end in ends if end in REFUSED_CODES]
            self.end = refused[0] if refused else GROUP_LOST if any(ends) else 0
            self._folder.cleanup()
        return lines

    def lose(self) -> None:
        """Ends all at once, because a rank of the group is lost. Any thread may call it."""
        self._is_lost = True
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        """To the leader, which ends the group in order; to all if it is on another host."""
        for child in self._children[:1] if self._first == 0 else self._children:
            child.signal(number)

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    def how_it_ended(self) -> str:
        return "is lost" if self.end == GROUP_LOST else f"ended with exit code {self.end}"
