"""Hosts that meet: the numbers of their ranks, the hosts that hear of one that comes again, and refused messages."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

from gpu_worker.group import meeting
from gpu_worker.group.launch import Meeting
from gpu_worker.group.meeting import Place
from tests.rigs.waiting import TIMEOUT_SECONDS

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs the test in a loop of its own, and ends the meetings that its hosts have held."""

    async def whole(*args: Any, **keywords: Any) -> None:
        HOSTS.clear()
        try:
            await asyncio.wait_for(test(*args, **keywords), TIMEOUT_SECONDS)
        finally:
            for host in HOSTS:
                if host.place._holds is not None:
                    host.place._holds.close()

    @wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        asyncio.run(whole(*args, **keywords))

    return run


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PAUSE": 0.0, "SIGN": 0.1, "SILENCE": 0.6, "JOIN": 20.0}.items():
        monkeypatch.setattr(meeting, f"_{name}_SECONDS", seconds)


class Host:
    """A launcher with some ranks."""

    def __init__(
        self, port: int, num_ranks: int, *, address: str = HOST, run_id: str = "x", num_hosts: int = 2
    ) -> None:
        about = Meeting(num_hosts=num_hosts, host=HOST, port=port, run_id=run_id, address=address)
        self._met = asyncio.Event()
        self.place = Place(about, num_ranks, self._met.set)
        self.is_lost = asyncio.Event()
        HOSTS.append(self)

    async def start(self) -> dict[str, str]:
        """The variables of its ranks, once all have met."""
        self._met.clear()
        while (found := self.place.variables()) is None:
            await self._met.wait()
        self.is_lost.clear()
        self.place.watch(self.is_lost.set)
        return found


HOSTS: list[Host] = []


async def started(*hosts: Host) -> list[dict[str, str]]:
    return list(await asyncio.gather(*(host.start() for host in hosts)))


@in_loop
async def test_the_ranks_of_all_hosts_are_numbered_by_their_addresses() -> None:
    port = free_port()
    second, first = Host(port, 3, address="127.0.0.3"), Host(port, 2, address="127.0.0.2")
    of_second, of_first = await started(second, first)
    port_of_leader = of_first.pop("MASTER_PORT")
    assert 0 < int(port_of_leader) < 1 << 16
    assert of_first == {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.2"}
    assert of_second == of_first | {"RANK": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": port_of_leader}


@in_loop
async def test_groups_meet_at_one_port_and_do_not_see_each_other() -> None:
    port = free_port()
    ones, others = ([Host(port, count, run_id=name) for count in (1, 1)] for name in ("ones", "others"))
    found = await started(*ones, *others)
    assert [variables["WORLD_SIZE"] for variables in found] == ["2"] * 4
    assert sorted(variables["RANK"] for variables in found[:2]) == ["0", "1"]
    assert len({variables["MASTER_PORT"] for variables in found}) == 2
    await started(*ones)
    assert not any(host.is_lost.is_set() for host in others)


@in_loop
async def test_a_host_that_comes_again_ends_the_ranks_of_the_others() -> None:
    hosts = [Host(free_port(), 1)]
    hosts += [Host(hosts[0].place._meeting.port, 1)]
    await started(*hosts)
    comes = asyncio.create_task(hosts[1].start())
    await hosts[0].is_lost.wait()
    assert not comes.done()
    found = await asyncio.gather(comes, hosts[0].start())
    assert sorted(variables["RANK"] for variables in found) == ["0", "1"]
    assert not any(host.is_lost.is_set() for host in hosts)


@asynccontextmanager
async def silent_server(port: int) -> AsyncIterator[None]:
    """Takes connections and says nothing, as a host behind a pulled cable."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, port)
    yield
    server.close()


@in_loop
async def test_a_silent_meeting_is_left_and_held_by_another(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with silent_server(port):
        joins = [asyncio.create_task(host.start()) for host in (Host(port, 1), Host(port, 1))]
        while "the meeting's host does not answer: no answer in 0.6 s" not in caplog.text:
            await asyncio.sleep(0.01)
    assert f"waiting for the other hosts of the group at {HOST}:{port}; " in caplog.text
    assert sorted(variables["RANK"] for variables in await asyncio.gather(*joins)) == ["0", "1"]


@in_loop
async def test_ranks_do_not_end_with_a_meeting_that_goes() -> None:
    port = free_port()
    holder, other = Host(port, 1), Host(port, 1)
    await started(holder, other)
    for host in (holder, other):
        if host.place._holds is not None:
            host.place._holds.close()
    for task in [*holder.place._tasks, *other.place._tasks]:
        if task.get_coro().__name__ == "_give_signs":  # type: ignore[attr-defined]
            task.cancel()
    await asyncio.sleep(0.8)
    assert not holder.is_lost.is_set() and not other.is_lost.is_set()


async def waiting_after(line: bytes) -> tuple[int, "asyncio.Task[dict[str, str]]", Host]:
    """A port, the start of a host that waits there and ended the connection that said this line, and another host."""
    port = free_port()
    hosts = Host(port, 1), Host(port, 1)
    joins = asyncio.create_task(hosts[0].start())
    while hosts[0].place._holds is None:
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(line)
    # The holder gives signs of life, and then ends the connection.
    assert (await reader.read()).strip() == b""
    writer.close()
    return port, joins, hosts[1]


@in_loop
async def test_a_host_that_is_silent_while_it_waits_is_gone() -> None:
    about = {"run_id": "y", "num_hosts": 2, "num_ranks": 1, "address": "127.0.0.9", "port": 1}
    port, joins, other = await waiting_after(json.dumps(about).encode() + b"\n")
    later = [Host(port, 1, run_id="y") for _ in range(2)]
    assert [variables["WORLD_SIZE"] for variables in await started(*later)] == ["2", "2"]
    await asyncio.gather(joins, other.start())


@pytest.mark.parametrize(
    "line",
    [
        *(b"{}\n", b"[1]\n", b"\x80\x04N.\n", b"x" * 5000 + b"\n", b"x" * 5000),
        b'{"run_id":"x","num_hosts":2,"num_ranks":1,"address":"a host","port":1}\n',
        b'{"run_id":"x","num_hosts":1,"num_ranks":1,"address":"127.0.0.1","port":1}\n',
        b'{"run_id":"x","num_hosts":2,"num_ranks":1,"address":"127.0.0.1","port":65536}\n',
        b'{"run_id":"x","num_hosts":2,"num_ranks":1,"address":"127.0.0.1","port":1,"more":0}\n',
    ],
)
@in_loop
async def test_what_no_launcher_says_ends_the_connection_and_nothing_else(line: bytes) -> None:
    _, joins, other = await waiting_after(line)
    await asyncio.gather(joins, other.start())


@in_loop
async def test_a_port_that_this_user_may_not_open_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(asyncio, "start_server", refused)
    with pytest.raises(PermissionError):
        await Host(80, 1).start()
