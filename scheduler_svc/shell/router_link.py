"""One ZeroMQ ROUTER to many peers: it never blocks, never drops a frame silently, and detects lost peers.

Owns its socket, its monitor and the largest frame that each peer accepts. Does not read the frames.

A ROUTER does not report which peer disconnected. The socket's monitor reports that one did. Then every known peer is
probed with an empty frame, and a peer that cannot be routed to is gone. This detects a killed process in milliseconds.

A peer's identity belongs to the connection that used it first: a second connection with the same identity is ignored
while the first one is open. So a peer that connects again must use a new identity.
"""

from collections.abc import Callable, Container, Iterable, Iterator

import zmq
import zmq.utils.monitor

# A peer with this many unread frames is lost.
_SEND_LIMIT = 4096
_RECEIVE_LIMIT = 65_536
PROBE = b""
# Workers and front ends of this version accept frames of at least this size.
MAX_SENT_BYTES = 64 << 20
# As numbers, because operators of pyzmq's flags make an enum member in Python at each call.
_READABLE, _AT_ONCE, _AT_ONCE_WITH_MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class PeerLostError(Exception):
    """A frame cannot be sent: the peer is gone, or it no longer reads."""


class PeerFrameTooLargeError(PeerLostError):
    """The frame is above the peer's limit, at which the peer would close the connection; nothing was sent."""


class RouterLink:
    """Binds `endpoint`. A frame above `max_frame_bytes` closes its sender's connection before memory is allocated."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        max_frame_bytes: int,
        max_sent_bytes: int = MAX_SENT_BYTES,
        configure: "Callable[[zmq.Socket[bytes]], None] | None" = None,
    ) -> None:
        """`max_sent_bytes`: the largest frame to peers without a limit of their own (`limit_frames`).

        `configure` sets further options before the socket is bound.
        """
        self._endpoint, self._max_sent_bytes = endpoint, max_sent_bytes
        self._limits: dict[str, int] = {}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self.socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if configure is not None:
            configure(self.socket)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            # The context cannot end while a socket is open.
            self.close()
            raise
        # Both descriptors tell only of news since the sockets were last found empty (zmq_getsockopt, ZMQ_FD).
        self.fds = (int(self.socket.getsockopt(zmq.FD)),)
        self.monitor_fds = (int(self.monitor.getsockopt(zmq.FD)),)
        self.has_disconnects()

    def bind_again(self) -> None:
        """Binds the endpoint in addition, because its file was removed: connections stay. Raises OSError."""
        try:
            self.socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None

    def host_of(self, peer: str) -> str:
        """Returns the name of the peer's host if it is another one; empty for a peer on this host."""
        return ""

    def has_frames(self) -> bool:
        """Whether a frame can be received. If not, one of `fds` becomes readable when this may have changed.

        Any other call that uses the socket may take the news from the descriptor, so this is called before each wait.
        """
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def receive(self, limit: int) -> Iterator[tuple[str, bytes | None]]:
        """Yields (peer, payload) of at most `limit` messages. The payload is None if the message has several parts."""
        for _ in range(limit):
            # Cheaper than the exception of a receive from an empty socket.
            if not self.has_frames():
                return
            parts = self.socket.recv_multipart(_AT_ONCE)
            yield parts[0].decode("latin-1"), parts[1] if len(parts) == 2 else None

    def limit_frames(self, peer: str, max_bytes: int) -> None:
        """Sets the largest frame that this peer accepts; 0 keeps the default."""
        if max_bytes:
            self._limits[peer] = max_bytes

    def check(self, peers: Container[str], now: float) -> list[tuple[str, str]]:
        """Keeps only what it knows of these peers; returns (peer, reason) of those that lost their right to connect.

        Call it about once a second.
        """
        self._limits = {peer: limit for peer, limit in self._limits.items() if peer in peers}
        return []

    def send(self, peer: str, payload: bytes) -> None:
        """Queues a frame. Raises PeerLostError if the peer is gone or its queue is full, PeerFrameTooLargeError."""
        limit = self._limits.get(peer, self._max_sent_bytes)
        if len(payload) > limit:
            raise PeerFrameTooLargeError(f"a frame has {len(payload):,} bytes; the peer accepts at most {limit:,}")
        try:
            self.socket.send(self._routing_id(peer), _AT_ONCE_WITH_MORE)
            self.socket.send(payload, _AT_ONCE)
        except zmq.Again:
            raise PeerLostError(f"the peer has not read {_SEND_LIMIT} frames") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLostError("its connection is gone") from None
            raise

    def _routing_id(self, peer: str) -> bytes:
        return peer.encode("latin-1")

    def has_disconnects(self) -> bool:
        """Whether a connection ended since the last call. One of `monitor_fds` becomes readable when one did."""
        return bool(self._ended_connections())

    def _ended_connections(self) -> list[int]:
        """Returns the file descriptors of the connections that ended since the last call."""
        found: list[int] = []
        while int(self.monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            found.append(zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)["value"])
        return found

    def unreachable(self, peers: Iterable[str]) -> list[tuple[str, str]]:
        """Returns (peer, reason) for those of `peers` to which no frame can be sent."""
        lost: list[tuple[str, str]] = []
        for peer in peers:
            try:
                self.send(peer, PROBE)
            except PeerLostError as error:
                lost.append((peer, str(error)))
        return lost

    def close(self) -> None:
        """Closes the socket and its monitor."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(200)
