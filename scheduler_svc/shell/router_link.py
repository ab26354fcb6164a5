"""ZeroMQ towards many peers: one ROUTER that never blocks, never drops a frame silently, and finds out which peer left.

Owns its socket, its monitor and the largest frame that each peer takes. Knows nothing of what the frames mean.

A ROUTER does not say which peer left. The socket's monitor says that one did; then every known peer is probed with an
empty frame, and those that can no longer be routed to are gone. That finds a killed process within milliseconds.

A peer's identity belongs to the connection that brought it first: a second connection with the same identity is ignored
while the first one lives. So a peer that connects again must take a new identity.
"""

from collections.abc import Container, Iterable, Iterator

import zmq
import zmq.utils.monitor

# Frames a peer may have unread before it counts as lost.
_SEND_LIMIT = 4096
_RECEIVE_LIMIT = 65_536
PROBE = b""
# What workers and front ends of this version take at least.
MAX_SENT_BYTES = 64 << 20


class PeerLostError(Exception):
    """The peer cannot be sent to: it is gone, or it no longer reads."""


class FrameTooLargeError(PeerLostError):
    """The peer would end its connection at this frame, for good; nothing was sent."""


class RouterLink:
    """Binds `endpoint`; frames above `max_frame_bytes` end their sender's connection before memory is taken."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        max_frame_bytes: int,
        max_sent_bytes: int = MAX_SENT_BYTES,
    ) -> None:
        """`max_sent_bytes`: the largest frame for peers that `limit_frames` was not called for."""
        self._max_sent_bytes = max_sent_bytes
        self._limits: dict[str, int] = {}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self.socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            # An open socket would keep the context from ending.
            self.close()
            raise

    def receive(self, limit: int) -> Iterator[tuple[str, bytes | None]]:
        """What has come, at most `limit` messages: (peer, payload). The payload is None if it had several parts."""
        for _ in range(limit):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parts[0].decode("latin-1"), parts[1] if len(parts) == 2 else None

    def limit_frames(self, peer: str, max_bytes: int) -> None:
        """Sets the largest frame that this peer takes; 0 leaves the default."""
        if max_bytes:
            self._limits[peer] = max_bytes

    def keep_limits(self, peers: Container[str]) -> None:
        """Forgets the limits of all other peers."""
        self._limits = {peer: limit for peer, limit in self._limits.items() if peer in peers}

    def send(self, peer: str, payload: bytes) -> None:
        """Queues the frame for the peer. Raises PeerLostError if it is gone or its queue full, FrameTooLargeError."""
        limit = self._limits.get(peer, self._max_sent_bytes)
        if len(payload) > limit:
            raise FrameTooLargeError(f"a frame for it has {len(payload):,} bytes; it takes at most {limit:,}")
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
        """The peers of these that can no longer be sent to, and why."""
        lost: list[tuple[str, str]] = []
        for peer in peers:
            try:
                self.send(peer, PROBE)
            except PeerLostError as error:
                lost.append((peer, str(error)))
        return lost

    def close(self) -> None:
        """Closes both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(200)
