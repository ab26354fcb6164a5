"""The host, the network and the socket of a peer, on real TCP sockets."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from scheduler_svc.frontend.grpc_tuning.sockets import listeners, network_of, sockets_to
from tests.rigs.descriptors import open_descriptors, opened_since


@contextlib.contextmanager
def connected(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket, socket.socket, str]]:
    """A listener, the server's socket of a connection, the client's, and the client as gRPC names it."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        client = socket.create_connection(listener.getsockname()[:2])
        server = listener.accept()[0]
        own, port = client.getsockname()[:2]
        with client, server:
            yield listener, server, client, f"ipv6:%5B{own}%5D:{port}" if ":" in own else f"ipv4:{own}:{port}"


WITHOUT_SOCKET = ["ipv4:127.0.0.1:1", "unix:", "unix:/run/a", "ipv6:%5B::1%5D:1", "", "ipv4:"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_sockets_of_several_peers_are_found_in_one_pass_and_the_listener_by_its_port(host: str):
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(connected(host)) for _ in range(3)]
        before = open_descriptors()
        found = sockets_to([peer for *_, peer in made[:2]])
        assert set(found) == {peer for *_, peer in made[:2]}
        for _, server, _, peer in made[:2]:
            with found[peer] as one:
                assert one.getpeername() == server.getpeername()
        [listener] = listeners(made[0][0].getsockname()[1])
        with listener:
            assert listener.getsockname() == made[0][0].getsockname()
        # Nothing that was looked at stays open.
        assert not opened_since(before)


@pytest.mark.parametrize("peer", WITHOUT_SOCKET)
def test_a_peer_without_a_socket_is_not_found(peer: str):
    assert sockets_to([peer]) == {}


def test_nothing_is_found_among_too_many_files():
    with connected() as (_, _, _, peer):
        assert sockets_to([peer], 1) == {}


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:10.0.0.1:1", "10.0.0.1/32"),
        ("ipv6:%5B2001:db8:1:2:3::1%5D:1", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::2%25eth0%5D:1", "fe80::/64"),
        ("unix:", "None"),
        ("unknown", "None"),
    ],
)
def test_whom_a_peer_belongs_to(peer: str, network: str):
    assert str(network_of(peer)) == network


def test_a_connection_with_duplicates_is_found_once_and_nothing_stays_open():
    with connected() as (_, server, _, peer), server.dup():
        before = open_descriptors()
        with sockets_to([peer])[peer] as found:
            assert found.getpeername() == server.getpeername()
            assert len(opened_since(before)) == 1
        assert not opened_since(before)
