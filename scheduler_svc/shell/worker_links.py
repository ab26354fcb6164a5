"""The workers of this host and those of other hosts as one link. Owns which of both links a peer belongs to."""

from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack

import zmq

from scheduler_svc.remote import RemoteListener
from scheduler_svc.shell.remote_link import SEPARATOR, RemoteLink
from scheduler_svc.shell.router_link import RouterLink
from tandem_contract.logs import announce
from tandem_contract.settings import SettingError


class WorkerLinks:
    """Has the methods of a `RouterLink`. Names of remote workers have an `@`, those of local ones have none."""

    def __init__(self, local: RouterLink, remote: RemoteLink) -> None:
        self._local, self._remote = local, remote
        self._links = local, remote
        self.fds = (*local.fds, *remote.fds)
        self.monitor_fds = (*local.monitor_fds, *remote.monitor_fds)

    def _of(self, peer: str) -> RouterLink:
        return self._remote if SEPARATOR in peer else self._local

    def host_of(self, peer: str) -> str:
        """Returns the name of the peer's host if it is another one; empty for a peer on this host."""
        return self._of(peer).host_of(peer)

    def has_frames(self) -> bool:
        """Whether a frame can be received. If not, one of `fds` becomes readable when this may have changed."""
        # Both are asked: an answer takes the news from the descriptor.
        local, remote = self._local.has_frames(), self._remote.has_frames()
        return local or remote

    def receive(self, limit: int) -> Iterator[tuple[str, bytes | None]]:
        """Yields (peer, payload) of at most `limit` messages of each link."""
        for peer, frame in self._local.receive(limit):
            # Another process of this user could give itself the name of a remote worker.
            if SEPARATOR not in peer:
                yield peer, frame
        yield from self._remote.receive(limit)

    def limit_frames(self, peer: str, max_bytes: int) -> None:
        """Sets the largest frame that this peer accepts; 0 keeps the default."""
        self._of(peer).limit_frames(peer, max_bytes)

    def check(self, peers: Container[str], now: float) -> list[tuple[str, str]]:
        """Keeps only what it knows of these peers; returns (peer, reason) of those that lost their right to connect."""
        return [lost for link in self._links for lost in link.check(peers, now)]

    def send(self, peer: str, payload: bytes) -> None:
        """Queues a frame. Raises PeerLostError."""
        self._of(peer).send(peer, payload)

    def has_disconnects(self) -> bool:
        """Whether the connection of a peer ended since the last call. One of `monitor_fds` becomes readable then."""
        local, remote = self._local.has_disconnects(), self._remote.has_disconnects()
        return local or remote

    def unreachable(self, peers: Iterable[str]) -> list[tuple[str, str]]:
        """Returns (peer, reason) for those of `peers` to which no frame can be sent."""
        known = list(peers)
        return [
            lost for link in self._links for lost in link.unreachable(peer for peer in known if self._of(peer) is link)
        ]


WorkersLink = RouterLink | WorkerLinks


def with_remote(
    local: RouterLink, listener: RemoteListener | None, *, max_frame_bytes: int, stack: ExitStack
) -> WorkersLink:
    """Binds the address for workers of other hosts, if there is a listener. Raises SettingError."""
    if listener is None:
        return local
    stack.callback(listener.context.term)
    listener.start()
    try:
        remote = RemoteLink(listener, max_frame_bytes=max_frame_bytes)
    except zmq.ZMQError as error:
        raise SettingError(f"workers_listen: {listener.endpoint} cannot be bound: {error.strerror}") from None
    stack.callback(remote.close)
    announce("workers of other hosts connect to %s", remote.endpoint)
    return WorkerLinks(local, remote)
