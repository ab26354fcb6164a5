"""Router links on real sockets: who is gone is found out, who does not read is lost, nobody is dropped in silence."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from scheduler_svc.links import PROBE, PeerLostError, RouterLink

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


def received(link: RouterLink) -> tuple[str, bytes]:
    assert link.socket.poll(10_000)
    (message,) = link.receive(1)
    return message


def test_a_killed_peer_is_found_gone_and_others_are_not(
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
        assert link.gone(["peer", "other"]) == []
        child.kill()
        child.wait()
        assert link.monitor.poll(10_000)
        assert link.somebody_left()
        deadline = time.monotonic() + 10
        while link.gone(["peer", "other"]) != [("peer", "its connection is gone")]:
            assert time.monotonic() < deadline
    assert other.recv() == PROBE
    other.close(0)
    link.close()


def test_an_unknown_peer_and_one_that_does_not_read_are_lost(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1 << 20)
    with pytest.raises(PeerLostError, match="gone"):
        link.send("nobody", b"x")
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.ROUTING_ID, b"deaf")
    deaf.connect(endpoint)
    deaf.send(b"x")
    received(link)

    def flood() -> None:
        for _ in range(20_000):
            link.send("deaf", b"x" * 4096)

    with pytest.raises(PeerLostError, match="4096 frames unread"):
        flood()
    deaf.close(0)
    link.close()


def test_a_frame_above_the_bound_ends_its_senders_connection(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    link = RouterLink(context, endpoint, max_frame_bytes=1000)
    sender = context.socket(zmq.DEALER)
    sender.connect(endpoint)
    sender.send(b"y" * 1001)
    assert link.monitor.poll(10_000)
    assert link.somebody_left()
    assert list(link.receive(10)) == []
    sender.close(0)
    link.close()
