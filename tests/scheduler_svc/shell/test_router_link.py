"""Router links on real sockets: lost peers are detected, frames are bounded, an identity belongs to its first peer."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from scheduler_svc.shell.links import PROBE, PeerLostError, RouterLink
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


class Site:
    """A link and its peers."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.context = endpoint, zmq.Context[zmq.Socket[bytes]]()
        self.link = RouterLink(self.context, endpoint, max_frame_bytes=1000, max_sent_bytes=5000)
        self.peers: list[zmq.Socket[bytes]] = []

    def dealer(self, name: bytes, *frames: bytes, **options: int) -> zmq.Socket[bytes]:
        """A peer that sends these frames."""
        peer = self.context.socket(zmq.DEALER)
        peer.setsockopt(zmq.ROUTING_ID, name)
        for option, value in options.items():
            peer.setsockopt(getattr(zmq, option), value)
        peer.connect(self.endpoint)
        self.peers.append(peer)
        for frame in frames:
            peer.send(frame)
        return peer

    def received(self) -> tuple[str, bytes | None]:
        assert self.link.socket.poll(1000 * TIMEOUT_SECONDS)
        (message,) = self.link.receive(1)
        return message


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(f"ipc://{tmp_path}/s")
    yield site
    site.link.close()
    site.context.destroy(linger=0)


def test_a_failed_bind_leaves_no_socket_open(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        RouterLink(context, f"ipc://{tmp_path}/taken", max_frame_bytes=1 << 20)
    # This waits until every socket of the context is closed.
    context.term()


def test_a_killed_peer_is_unreachable_and_others_are_not(site: Site) -> None:
    link, other = site.link, site.dealer(b"other", b"here")
    assert site.received() == ("other", b"here")
    with subprocess.Popen([sys.executable, "-c", CHILD, site.endpoint]) as child:
        assert site.received() == ("peer", b"hello")
        link.send("peer", b"answer")
        assert link.unreachable(["peer", "other"]) == []
        child.kill()
        child.wait()
        assert link.monitor.poll(1000 * TIMEOUT_SECONDS)
        assert link.has_disconnects()
        until(lambda: link.unreachable(["peer", "other"]) == [("peer", "its connection is gone")])
    assert other.recv() == PROBE


def test_a_send_to_an_unknown_peer_or_one_that_does_not_read_fails(site: Site) -> None:
    with pytest.raises(PeerLostError, match="gone"):
        site.link.send("unknown", b"x")
    site.dealer(b"deaf", b"x", RCVHWM=1)
    site.received()

    def flood() -> None:
        for _ in range(20_000):
            site.link.send("deaf", b"x" * 4096)

    with pytest.raises(PeerLostError, match="has not read 4096 frames"):
        flood()


def test_a_frame_above_the_limit_closes_its_senders_connection(site: Site) -> None:
    site.dealer(b"sender", b"y" * 1001)
    assert site.link.monitor.poll(1000 * TIMEOUT_SECONDS)
    assert site.link.has_disconnects()
    assert list(site.link.receive(10)) == []


def test_a_frame_above_the_peers_limit_is_not_sent(site: Site) -> None:
    link = site.link
    for name in (b"small", b"other"):
        site.dealer(name, b"x")
        site.received()
    link.limit_frames("small", 1500)
    link.limit_frames("other", 0)
    for name, limit in (("small", 1500), ("other", 5000)):
        link.send(name, b"x" * limit)
        with pytest.raises(PeerLostError, match=f"has {limit + 1:,} bytes; the peer accepts at most {limit:,}"):
            link.send(name, b"x" * (limit + 1))
    assert [len(peer.recv()) for peer in site.peers] == [1500, 5000]
    assert link.check(["other"], 0.0) == []
    link.send("small", b"x" * 1501)


def test_an_identity_belongs_to_the_connection_that_used_it_first(site: Site) -> None:
    true = site.dealer(b"peer", b"hello")
    assert site.received() == ("peer", b"hello")
    # The forger connected before the last peer, so its frame would have arrived first.
    forger, _ = site.dealer(b"peer", b"forged"), site.dealer(b"last", b"here")
    assert site.received() == ("last", b"here")
    site.link.send("peer", b"answer")
    assert true.poll(1000 * TIMEOUT_SECONDS)
    assert true.recv() == b"answer"
    true.send(b"still here")
    assert site.received() == ("peer", b"still here")
    assert not forger.poll(0)


def test_a_message_of_several_parts_has_no_payload(site: Site) -> None:
    site.dealer(b"peer").send_multipart([b"a", b"b"])
    assert site.received() == ("peer", None)
