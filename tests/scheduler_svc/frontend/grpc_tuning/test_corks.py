"""Messages of one turn leave their connection together, on real TCP sockets."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.frontend.grpc_tuning.sockets import MAX_HELD, Connection, Corks
from tests.rigs.descriptors import open_descriptors, opened_since
from tests.scheduler_svc.frontend.grpc_tuning import test_peers


def call_of(peer: str) -> Any:
    return SimpleNamespace(peer=lambda: peer)


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, Any]]:
    """The server's socket of a connection, the client's, and a call on it."""
    with test_peers.connected() as (_, server, client, peer):
        client.setblocking(False)
        yield server, client, call_of(peer)


@contextlib.contextmanager
def joined(*contexts: Any) -> Iterator[list[Connection]]:
    """Calls of one front end, and the connection of each."""
    corks = Corks()
    connections = [corks.join(context) for context in contexts]
    yield connections
    for connection in connections:
        corks.leave(connection)


def read(client: socket.socket) -> bytes:
    """What has arrived."""
    try:
        return client.recv(1 << 16)
    except BlockingIOError:
        return b""


def is_corked(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK))


async def test_messages_of_one_turn_leave_at_its_end() -> None:
    with connected() as (server, client, context), joined(context, context) as [connection, _]:
        for message in (b"a", b"b", b"c"):
            connection.hold()
            server.send(message)
        assert read(client) == b""
        await asyncio.sleep(0)
        assert read(client) == b"abc" and not is_corked(server)


async def test_a_long_turn_sends_what_it_has() -> None:
    with connected() as (server, client, context), joined(context, context) as [connection, _]:
        for _ in range(MAX_HELD + 1):
            connection.hold()
            server.send(b"a")
        assert len(read(client)) == MAX_HELD
        await asyncio.sleep(0)
        assert read(client) == b"a" and not is_corked(server)


async def test_a_single_call_is_not_corked() -> None:
    with connected() as (server, client, context), joined(context) as [connection]:
        connection.hold()
        server.send(b"a")
        assert read(client) == b"a" and connection.duplicate is None


async def test_the_last_call_sends_and_closes_the_duplicate() -> None:
    with connected() as (server, client, context):
        corks = Corks()
        before = open_descriptors()
        calls = [corks.join(context) for _ in range(3)]
        assert len(opened_since(before)) == 1
        calls[0].hold()
        server.send(b"a")
        for call in calls:
            corks.leave(call)
        assert read(client) == b"a" and not opened_since(before)
        # The turn of the message ends after the call.
        await asyncio.sleep(0)
        server.close()
        assert read(client) == b"" and client.recv(1) == b""


async def test_connections_are_told_apart() -> None:
    with (
        connected() as (server, client, context),
        connected() as (other, _, other_context),
        joined(context, other_context, context, other_context) as calls,
    ):
        calls[0].hold()
        assert is_corked(server) and not is_corked(other)
        server.send(b"a")
        await asyncio.sleep(0)
        assert read(client) == b"a"


@pytest.mark.parametrize("peer", test_peers.WITHOUT_SOCKET)
async def test_a_peer_without_a_socket_is_served_as_before(peer) -> None:
    corks = Corks()
    calls = [corks.join(call_of(peer)) for _ in range(2)]
    for call in calls:
        call.hold()
        corks.leave(call)
    assert calls[0].duplicate is None


def test_a_connection_that_was_never_corked_holds_nothing():
    connection = Connection("ipv4:127.0.0.1:1")
    connection.hold()
    connection.flush()
    assert connection.duplicate is None
