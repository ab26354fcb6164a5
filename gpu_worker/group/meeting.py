"""Where the launchers of a group on several hosts meet before each start of their ranks.

One launcher holds the meeting at its port, for all groups that meet there. Each names itself; when all hosts of a
group are there, each gets the numbers of its ranks and where rank 0 listens. Connections stay: if a host comes again
while the others' ranks run, the others are notified, and come again too. Messages are lines of JSON; empty lines are
signs of life, in both directions. Ranks of other hosts that end are noticed by those of this one (`pulse.py`). Owns
both sides. Imports no torch.
"""

import asyncio
import errno
import logging
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpu_worker.failures import first_line
from gpu_worker.group.launch import Meeting
from tandem_contract.logs import is_worth_a_line
from tandem_contract.needed import needed_task
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

# How long a launcher waits for the others before it says so again, and for a connection.
_JOIN_SECONDS, _CONNECT_SECONDS = 60.0, 2.0
# An end that is silent for five seconds is gone.
_SIGN_SECONDS, _SILENCE_SECONDS = 1.0, 5.0
# Between two looks for the meeting's host.
_PAUSE_SECONDS = 1.0
# The most bytes of a line, and the most hosts of all groups.
_MOST_BYTES, _MOST_HOSTS = 4096, 1024
_SIGN, _AGAIN = b"\n", b"again\n"


class _Host(BaseModel):
    """What a launcher says of its host."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(max_length=64)
    num_hosts: int = Field(ge=2)
    num_ranks: int = Field(ge=1)
    # Where its first rank listens if that is rank 0.
    address: IPv4Address
    port: int = Field(ge=1, lt=1 << 16)


class _Seat(BaseModel):
    """What a launcher gets when all have met: the variables of its ranks, RANK for the first of them."""

    model_config = ConfigDict(extra="forbid")

    RANK: int
    WORLD_SIZE: int
    LOCAL_WORLD_SIZE: int
    MASTER_ADDR: IPv4Address
    MASTER_PORT: int


class _Holder:
    """The holder's side: hosts that wait for a start, by group, and those that have started."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[StreamWriter, _Host]] = {}
        self._started: dict[str, dict[StreamWriter, _Host]] = {}
        self._num_hosts = 0

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serves one launcher until it goes."""
        self._num_hosts += 1
        signs = asyncio.ensure_future(_give_signs(writer))
        run_id = ""
        # It has gone, or is not a launcher.
        with suppress(OSError, ValueError):
            if self._num_hosts <= _MOST_HOSTS:
                host = _Host.model_validate_json(await _line(reader))
                run_id = host.run_id
                self._take(host, writer)
                while True:
                    await _line(reader)
        self._num_hosts -= 1
        for groups in (self._waiting, self._started):
            groups.get(run_id, {}).pop(writer, None)
            if not groups.get(run_id):
                groups.pop(run_id, None)
        signs.cancel()
        writer.close()

    def _take(self, host: _Host, writer: StreamWriter) -> None:
        for started in self._started.pop(host.run_id, {}):
            started.write(_AGAIN)
        waiting = self._waiting.setdefault(host.run_id, {})
        waiting[writer] = host
        if len(waiting) < host.num_hosts:
            return
        # A host with another number of ranks is found by the ranks.
        met = sorted(waiting.items(), key=lambda item: (str(item[1].address), item[1].port))
        leader, sizes = met[0][1], [other.num_ranks for _, other in met]
        for place, (seated, other) in enumerate(met):
            seat = _Seat(
                RANK=sum(sizes[:place]),
                WORLD_SIZE=sum(sizes),
                LOCAL_WORLD_SIZE=other.num_ranks,
                MASTER_ADDR=leader.address,
                MASTER_PORT=leader.port,
            )
            seated.write(seat.model_dump_json().encode() + b"\n")
        self._started[host.run_id] = self._waiting.pop(host.run_id)


class Place:
    """This host's place at the meeting, over all starts of its ranks. Used in a running loop."""

    def __init__(self, meeting: Meeting, num_ranks: int, on_met: Callable[[], None]) -> None:
        """num_ranks: those of this host. on_met: called when `variables` has an answer."""
        self._meeting, self._num_ranks, self._on_met = meeting, num_ranks, on_met
        self._holds: asyncio.Server | None = None
        self._joining: asyncio.Task[dict[str, str]] | None = None
        # The connection of the last start, and the tasks on it.
        self._reader: StreamReader | None = None
        self._tasks: list[asyncio.Future[Any]] = []

    def variables(self) -> dict[str, str] | None:
        """Joins the meeting. The variables of a start once all hosts are there, None before. Raises OSError."""
        if self._joining is None:
            meeting = self._meeting
            log.info(
                "this host is %s; its ranks start when %s met at %s",
                meeting.address, numbered(meeting.num_hosts, "host", "have"), meeting.endpoint,
            )  # fmt: skip
            self._joining = asyncio.ensure_future(self._join())
            self._joining.add_done_callback(lambda _: self._on_met())
        if not self._joining.done():
            return None
        joined, self._joining = self._joining, None
        return joined.result()

    def watch(self, on_waiting: Callable[[], None]) -> None:
        """Calls `on_waiting` when another host waits for a start; until the next `variables`.

        A meeting that is silent or gone does not end ranks.
        """
        self._tasks.append(needed_task(self._hear(on_waiting), "meeting"))

    async def _join(self) -> dict[str, str]:
        num_waits = 0
        while True:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            await self._hold()
            try:
                async with asyncio.timeout(_JOIN_SECONDS):
                    return await self._meet()
            except TimeoutError:
                reason = "not all hosts are there"
            except (OSError, ValueError) as error:
                reason = f"the meeting's host does not answer: {first_line(error)}"
            num_waits += 1
            if is_worth_a_line(num_waits):
                log.warning("waiting for the other hosts of the group at %s; %s", self._meeting.endpoint, reason)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _hold(self) -> None:
        """Holds the meeting if no other process does, and its address is this host's. Raises OSError."""
        host, port = self._meeting.host, self._meeting.port
        try:
            self._holds = self._holds or await asyncio.start_server(
                _Holder().serve, host, port, family=socket.AF_INET, limit=_MOST_BYTES
            )
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise

    async def _meet(self) -> dict[str, str]:
        """Waits for the other hosts. Raises OSError or ValueError."""
        meeting = self._meeting
        connecting = asyncio.open_connection(meeting.host, meeting.port, family=socket.AF_INET, limit=_MOST_BYTES)
        try:
            self._reader, writer = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        except TimeoutError:
            raise ConnectionError(f"no answer in {_CONNECT_SECONDS:g} s") from None
        self._tasks.append(asyncio.ensure_future(_give_signs(writer)))
        with socket.create_server((meeting.address, 0)) as free:
            port = free.getsockname()[1]
        host = _Host(
            run_id=meeting.run_id,
            num_hosts=meeting.num_hosts,
            num_ranks=self._num_ranks,
            address=IPv4Address(meeting.address),
            port=port,
        )
        writer.write(host.model_dump_json().encode() + b"\n")
        seat = _Seat.model_validate_json(await _line(self._reader))
        return {name: str(value) for name, value in seat}

    async def _hear(self, on_waiting: Callable[[], None]) -> None:
        assert self._reader is not None, "the hosts have met"
        with suppress(OSError, ValueError):
            if await _line(self._reader) == _AGAIN:
                on_waiting()


async def _line(reader: StreamReader) -> bytes:
    """The next line other than signs of life. Raises ConnectionError, or ValueError for a line that is too long."""
    while True:
        try:
            line = await asyncio.wait_for(reader.readline(), _SILENCE_SECONDS)
        except TimeoutError:
            raise ConnectionError(f"no answer in {_SILENCE_SECONDS:g} s") from None
        if not line:
            raise ConnectionError("it has ended the connection")
        if line != _SIGN:
            return line


async def _give_signs(writer: StreamWriter) -> None:
    """Gives signs of life until it is cancelled, and then ends the connection."""
    try:
        while True:
            writer.write(_SIGN)
            await asyncio.sleep(_SIGN_SECONDS)
    finally:
        writer.close()
