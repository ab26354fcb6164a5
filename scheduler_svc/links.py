"""ZeroMQ towards many peers: one ROUTER that never blocks, never drops in silence, and tells who is gone.

Owns its socket and its monitor. Knows nothing of what the frames mean.

A ROUTER does not say which peer left. The socket's monitor says that one did; then every known peer is probed with an
empty frame, and those that can no longer be routed to are gone. That finds a killed process within milliseconds.
"""

from collections.abc import Iterable, Iterator

import zmq
import zmq.utils.monitor

# Frames a peer may have unread before it counts as lost.
_SEND_LIMIT = 4096
_RECEIVE_LIMIT = 65_536
PROBE = b""


class PeerLostError(Exception):
    """The peer cannot be sent to: gone, or it reads nothing any more."""


class RouterLink:
    """Binds `endpoint`; frames above `max_frame_bytes` end their sender's connection before memory is taken."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, max_frame_bytes: int) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self.socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.bind(endpoint)

    def receive(self, limit: int) -> Iterator[tuple[str, bytes]]:
        """What has come, at most `limit` frames: (peer, payload). Anything but two-part messages is dropped."""
        for _ in range(limit):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                yield parts[0].decode("latin-1"), parts[1]

    def send(self, peer: str, payload: bytes) -> None:
        """Hands the frame over. Raises PeerLostError where the peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([peer.encode("latin-1"), payload], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerLostError(f"it has {_SEND_LIMIT} frames unread") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLostError("its connection is gone") from None
            raise

    def somebody_left(self) -> bool:
        """Whether a connection ended since the last call."""
        left = False
        while self.monitor.poll(0):
            zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)
            left = True
        return left

    def gone(self, peers: Iterable[str]) -> list[tuple[str, str]]:
        """Which of these peers can no longer be sent to, and why."""
        lost: list[tuple[str, str]] = []
        for peer in peers:
            try:
                self.send(peer, PROBE)
            except PeerLostError as error:
                lost.append((peer, str(error)))
        return lost

    def close(self) -> None:
        """Lets go of both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(200)
