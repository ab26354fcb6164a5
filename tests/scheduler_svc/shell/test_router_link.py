"""Router links on real sockets: lost peers are detected, frames are bounded, an identity belongs to its first peer."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from scheduler_svc.shell.links import PROBE, PeerFrameTooLargeError, PeerLostError, RouterLink
from tests.rigs.waiting import TIMEOUT_SECONDS, until

CHILD = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, b"peer")
socket.connect(sys.argv[1])
socket.send(b"hello")
socket.recv()
socket.recv()
"""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_failed_bind_leaves_no_socket_open(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        RouterLink(context, f"ipc://{tmp_path}/taken", max_frame_bytes=1 << 20)
    # This waits until every socket of the context is closed.
    context.term()


def received(link: RouterLink) -> tuple[str, bytes | None]:
    assert link.socket.poll(1000 * TIMEOUT_SECONDS)
    (message,) = link.receive(1)
    return message


def test_a_killed_peer_is_unreachable_and_others_are_not(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1000)
    other = context.socket(zmq.DEALER)
    other.setsockopt(zmq.ROUTING_ID, b"other")
    other.connect(endpoint)
    other.send(b"here")
    assert received(link) == ("other", b"here")
    with subprocess.Popen([sys.executable, "-c", CHILD, endpoint]) as child:
        assert received(link) == ("peer", b"hello")
        link.send("peer", b"answer")
        assert link.unreachable(["peer", "other"]) == []
        child.kill()
        child.wait()
        assert link.monitor.poll(1000 * TIMEOUT_SECONDS)
        assert link.has_disconnects()
        until(lambda: link.unreachable(["peer", "other"]) == [("peer", "its connection is gone")])
    assert other.recv() == PROBE
    other.close(0)
    link.close()


def test_a_send_to_an_unknown_peer_or_one_that_does_not_read_fails(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1 << 20)
    with pytest.raises(PeerLostError, match="gone"):
        link.send("unknown", b"x")
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.ROUTING_ID, b"deaf")
    deaf.connect(endpoint)
    deaf.send(b"x")
    received(link)

    def flood() -> None:
        for _ in range(20_000):
            link.send("deaf", b"x" * 4096)

    with pytest.raises(PeerLostError, match="has not read 4096 frames"):
        flood()
    deaf.close(0)
    link.close()


def test_a_frame_above_the_limit_closes_its_senders_connection(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1000)
    sender = context.socket(zmq.DEALER)
    sender.connect(endpoint)
    sender.send(b"y" * 1001)
    assert link.monitor.poll(1000 * TIMEOUT_SECONDS)
    assert link.has_disconnects()
    assert list(link.receive(10)) == []
    sender.close(0)
    link.close()


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.connect(endpoint)
    return socket


def test_a_frame_above_the_peers_limit_is_not_sent(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1000, max_sent_bytes=2000)
    peers = [dealer(context, endpoint, name) for name in (b"small", b"other")]
    for peer in peers:
        peer.send(b"x")
        received(link)
    link.limit_frames("small", 1500)
    link.limit_frames("other", 0)
    link.send("small", b"x" * 1500)
    with pytest.raises(PeerFrameTooLargeError, match="has 1,501 bytes; the peer accepts at most 1,500"):
        link.send("small", b"x" * 1501)
    link.send("other", b"x" * 2000)
    with pytest.raises(PeerFrameTooLargeError, match="has 2,001 bytes; the peer accepts at most 2,000"):
        link.send("other", b"x" * 2001)
    assert [len(peer.recv()) for peer in peers] == [1500, 2000]
    assert link.check(["other"], 0.0) == []
    link.send("small", b"x" * 1501)
    for peer in peers:
        peer.close(0)
    link.close()


def test_an_identity_belongs_to_the_connection_that_used_it_first(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1000)
    true, forger, last = (dealer(context, endpoint, name) for name in (b"peer", b"peer", b"last"))
    true.send(b"hello")
    assert received(link) == ("peer", b"hello")
    forger.send(b"forged")
    # The forger connected before this peer, so its frame would have arrived first.
    last.send(b"here")
    assert received(link) == ("last", b"here")
    link.send("peer", b"answer")
    assert true.poll(1000 * TIMEOUT_SECONDS)
    assert true.recv() == b"answer"
    true.send(b"still here")
    assert received(link) == ("peer", b"still here")
    assert not forger.poll(0)
    for peer in (true, forger, last):
        peer.close(0)
    link.close()


def test_a_message_of_several_parts_has_no_payload(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1000)
    peer = dealer(context, endpoint, b"peer")
    peer.send_multipart([b"a", b"b"])
    assert received(link) == ("peer", None)
    peer.close(0)
    link.close()
