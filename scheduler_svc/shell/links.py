"""The links to peers: ZeroMQ ROUTERs that never block, never drop a frame silently, and detect lost peers.

A link owns its socket, its monitor and the largest frame that each peer accepts. It does not read the frames.

A ROUTER does not report which peer disconnected. The socket's monitor reports that one did. Then every known peer is
probed with an empty frame, and a peer that cannot be routed to is gone. This detects a killed process in milliseconds.
A second connection with the identity of an open one is ignored.

A worker on another host is called `ID@NAME`: its routing id, and the name of its key. libzmq reports of each frame the
key and the file descriptor of its connection, and of an ended connection the descriptor. So each frame's key is checked
again, a connection that ended and was opened again under the same routing id is noticed, and connections of strangers
cost no probe of the workers.
"""

import logging
import os
import socket
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import zmq
import zmq.utils.monitor

from scheduler_svc.remote import RemoteListener
from tandem_contract.logs import announce
from tandem_contract.plural import counted, numbered
from tandem_contract.settings import SettingError

# A peer with this many unread frames is lost.
_SEND_LIMIT = 4096
_RECEIVE_LIMIT = 65_536
PROBE = b""
# Workers and front ends of this version accept frames of at least this size.
MAX_SENT_BYTES = 64 << 20
# As numbers, because operators of pyzmq's flags make an enum member in Python at each call.
_READABLE, _AT_ONCE, _AT_ONCE_WITH_MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class PeerLostError(Exception):
    """A frame cannot be sent: the peer is gone, no longer reads, or would close the connection for the frame's size."""


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
        try:
            if configure is not None:
                configure(self.socket)
            self.socket.bind(endpoint)
        except BaseException:
            # The context would wait for ever for a socket that is open.
            self.close()
            raise
        # Both descriptors report only news since the sockets were last found empty (zmq_getsockopt, ZMQ_FD).
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
        """Yields (peer, payload) of at most `limit` messages. The payload of a message with several parts is None."""
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
        """Forgets other peers; returns (peer, reason) of those that may not connect any more. Call it once a second."""
        self._limits = {peer: limit for peer, limit in self._limits.items() if peer in peers}
        return []

    def send(self, peer: str, payload: bytes) -> None:
        """Queues a frame. Raises PeerLostError; then nothing was sent."""
        limit = self._limits.get(peer, self._max_sent_bytes)
        if len(payload) > limit:
            raise PeerLostError(f"a frame has {counted(len(payload), 'byte')}; the peer accepts at most {limit:,}")
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
        descriptors: list[int] = []
        while int(self.monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            descriptors.append(zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)["value"])
        return descriptors

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
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(200)


log = logging.getLogger("tandem.core")

_REPORT_SECONDS = 10.0
SEPARATOR = "@"
_EXPELLED = "its key is no longer admitted"


class _Source(NamedTuple):
    """Where a frame came from."""

    key: str
    fd: int


class RemoteLink(RouterLink):
    """Binds the listener's endpoint. Only connections with an admitted key reach it."""

    def __init__(self, listener: RemoteListener, *, max_frame_bytes: int) -> None:
        self._admitted = listener.admitted
        self._sources = dict[str, _Source]()
        self._peers = dict[int, str]()
        # Lost peers that were not reported yet, with the reason.
        self._gone = dict[str, str]()
        self._num_strangers = 0
        self._report_at = 0.0
        super().__init__(
            listener.context, listener.endpoint, max_frame_bytes=max_frame_bytes, configure=listener.configure
        )
        self.endpoint = str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._port = int(self.endpoint.rpartition(":")[2])

    def host_of(self, peer: str) -> str:
        """Returns the name of the peer's key."""
        return peer.rpartition(SEPARATOR)[2]

    def receive(self, limit: int) -> Iterator[tuple[str, bytes | None]]:
        """As in `RouterLink`. Frames with a key that is no longer admitted are dropped, and end their connection."""
        for _ in range(limit):
            if not self.has_frames():
                return
            parts = self.socket.recv_multipart(_AT_ONCE, copy=False)
            last = parts[-1]
            source = _Source(key=str(last.get("User-Id")), fd=int(last.get(zmq.SRCFD)))
            name = self._admitted.names.get(source.key)
            if name is None:
                if source.fd in self._peers:
                    self._gone[self._peers[source.fd]] = _EXPELLED
                self._end(source)
                continue
            peer = f"{parts[0].bytes.decode('latin-1')}{SEPARATOR}{name}"
            if self._sources.get(peer) != source or self._peers.get(source.fd) != peer:
                self._sources[peer], self._peers[source.fd] = source, peer
            yield peer, last.bytes if len(parts) == 2 else None

    def has_disconnects(self) -> bool:
        """Whether the connection of a peer ended since the last call; others are only counted."""
        for fd in self._ended_connections():
            peer = self._peers.pop(fd, None)
            if peer is None:
                self._num_strangers += 1
                continue
            self._gone.setdefault(peer, "its connection ended")
            if (source := self._sources.get(peer)) is not None and source.fd == fd:
                # The next connection of this peer may get the same descriptor.
                del self._sources[peer]
        return bool(self._gone)

    def unreachable(self, peers: Iterable[str]) -> list[tuple[str, str]]:
        """As in `RouterLink`; peers of an ended connection are among them even if they have connected again."""
        asked = list(peers)
        gone, self._gone = self._gone, {}
        lost = [(peer, gone[peer]) for peer in asked if peer in gone]
        return lost + super().unreachable(peer for peer in asked if peer not in gone)

    def check(self, peers: Container[str], now: float) -> list[tuple[str, str]]:
        """As in `RouterLink`: ends the connections of peers with a removed key."""
        super().check(peers, now)
        self._sources = {peer: source for peer, source in self._sources.items() if peer in peers}
        self._peers = {source.fd: peer for peer, source in self._sources.items()}
        self._report(now)
        names = self._admitted.names
        expelled = [peer for peer, source in self._sources.items() if names.get(source.key) != self.host_of(peer)]
        for peer in expelled:
            self._end(self._sources.pop(peer))
        return [(peer, _EXPELLED) for peer in expelled]

    def _end(self, source: _Source) -> None:
        """Ends a connection. libzmq can end none by itself, so its TCP socket is shut down, which libzmq notices."""
        try:
            with socket.socket(fileno=os.dup(source.fd)) as connection:
                # The descriptor may be another file by now. A connection of another worker would be opened again.
                if connection.getsockname()[1] == self._port:
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            pass  # It has ended.

    def _report(self, now: float) -> None:
        """Logs every ten seconds how many connections came to nothing."""
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_SECONDS
        if self._num_strangers:
            log.warning(
                "%s ended before a worker joined", numbered(self._num_strangers, f"connection to {self.endpoint}")
            )
        self._num_strangers = 0

    def _routing_id(self, peer: str) -> bytes:
        return peer.rpartition(SEPARATOR)[0].encode("latin-1")


WorkersLinks = tuple[RouterLink, ...]
"""The link of the workers on this host, and that of the others, if there is one."""


def link_of(worker: str, links: WorkersLinks) -> RouterLink:
    """Names of remote workers have an `@`, those of local ones have none."""
    return links[-1] if SEPARATOR in worker else links[0]


def with_remote(
    local: RouterLink, listener: RemoteListener | None, *, max_frame_bytes: int, stack: ExitStack
) -> WorkersLinks:
    """Binds the address for workers of other hosts, if there is a listener. Raises SettingError."""
    if listener is None:
        return (local,)
    stack.callback(listener.context.term)
    listener.start()
    try:
        remote = RemoteLink(listener, max_frame_bytes=max_frame_bytes)
    except zmq.ZMQError as error:
        raise SettingError(f"workers_listen: {listener.endpoint} cannot be bound: {error.strerror}") from None
    stack.callback(remote.close)
    announce("workers of other hosts connect to %s", remote.endpoint)
    return local, remote
