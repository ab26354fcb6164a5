"""The ROUTER of workers on other hosts: each frame's key is checked again, and lost peers are known by name.

A peer is called `ID@NAME`: its routing id, and the name of its key. libzmq tells of each frame the key and the file
descriptor of its connection, and of an ended connection the descriptor. So a connection that ended and was opened again
under the same routing id is noticed, and connections of strangers cost no probe of the workers.
"""

import logging
import os
import socket
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import zmq

from scheduler_svc.remote import RemoteListener
from scheduler_svc.shell.router_link import RouterLink

log = logging.getLogger("tandem.core")

_AT_ONCE = int(zmq.NOBLOCK)
_REPORT_SECONDS = 10.0
SEPARATOR = "@"
_EXPELLED = "its key is no longer admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
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
        """As in `RouterLink`; peers whose connection ended are among them even if they have connected again."""
        known = list(peers)
        gone, self._gone = self._gone, {}
        lost = [(peer, gone[peer]) for peer in known if peer in gone]
        return lost + super().unreachable(peer for peer in known if peer not in gone)

    def check(self, peers: Container[str], now: float) -> list[tuple[str, str]]:
        """As in `RouterLink`: ends the connections of peers whose key was removed."""
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
            log.warning("%d connections to %s ended before a worker joined", self._num_strangers, self.endpoint)
        self._num_strangers = 0

    def _routing_id(self, peer: str) -> bytes:
        return peer.rpartition(SEPARATOR)[0].encode("latin-1")
