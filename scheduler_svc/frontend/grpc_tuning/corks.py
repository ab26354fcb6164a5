"""Owns when small messages leave this host: those of one turn of the event loop leave their connection in one packet.

gRPC makes a system call for each message, and each call wakes the reader. While TCP_CORK is set, the kernel keeps what
is written; it sends all of it when the option is cleared. This module works on a duplicate of the connection's socket.
It closes the duplicate when the last call of the connection leaves, so the connection does not outlive gRPC's own
socket for long.

A connection whose socket is not found, such as one of a Unix socket, is served as without this module.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from scheduler_svc.frontend.grpc_tuning.peers import sockets_to

# Calls of a connection from which it is corked: with one call, a turn rarely has two messages.
MIN_CALLS = 2
# Messages that leave together at most, so that the first one does not wait for a long turn: some 3 ms of work.
MAX_HELD = 64
# Each takes one more file, out of `options.SPARE_FILES`.
MAX_CORKED = 64
# A connection's socket is looked for once, on the event loop, among so many files at most: 2 us each.
MAX_FILES = 1024


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of a client, while it has calls that stream."""

    peer: str
    num_calls: int = 0
    # A duplicate of its socket, if it is corked.
    duplicate: socket.socket | None = None
    # Messages since it was corked.
    _num_held: int = 0

    def hold(self) -> None:
        """The next message that is written waits for the end of the turn; call this before the write."""
        if self.duplicate is None:
            return
        if self._num_held == MAX_HELD:
            self.flush()
        if not self._num_held:
            self.duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            asyncio.get_running_loop().call_soon(self.flush)
        self._num_held += 1

    def flush(self) -> None:
        """Sends everything that waits."""
        if self._num_held and self.duplicate is not None:
            self._num_held = 0
            self.duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


class Corks:
    """The connections with calls that stream. A call joins and leaves by its context."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._max_corked = MAX_CORKED if is_on else 0
        self._connections: dict[str, Connection] = {}
        self._num_corked = 0

    def join(self, context: Any) -> Connection:
        """Counts a call of its connection."""
        peer = context.peer()
        connection = self._connections.setdefault(peer, Connection(peer))
        connection.num_calls += 1
        if connection.num_calls == MIN_CALLS and connection.duplicate is None and self._num_corked < self._max_corked:
            connection.duplicate = sockets_to([peer], MAX_FILES).get(peer)
            self._num_corked += connection.duplicate is not None
        return connection

    def leave(self, connection: Connection) -> None:
        """Ends what `join` began."""
        connection.num_calls -= 1
        if connection.num_calls:
            return
        del self._connections[connection.peer]
        if connection.duplicate is not None:
            connection.flush()
            connection.duplicate.close()
            connection.duplicate = None
            self._num_corked -= 1
