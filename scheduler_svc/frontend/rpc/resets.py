"""Owns how many calls a connection may reset in a second; beyond that it is closed.

A call that is reset before its message is read costs this process more than its caller, and gRPC has no bound for that
(grpcio 1.85.1: also with its own protection against it, 270,000 resets per second reach the server).
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter

from scheduler_svc.frontend.rpc.corks import socket_to

logger = logging.getLogger(__name__)

# Of one connection, among those calls that the event loop has taken from gRPC. A caller that changes its mind has sent
# the message with the call.
MAX_PER_SECOND = 200


class Resets:
    """Counts the calls that were reset without a message, in the current second."""

    def __init__(self) -> None:
        self._second = 0
        self._counts: Counter[str] = Counter()
        self._num_closed = 0

    def add(self, peer: str) -> None:
        """Counts a call of the connection; closes it if these were too many. `peer`: in gRPC's notation."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            if self._num_closed:
                closed, most = self._num_closed, MAX_PER_SECOND
                logger.warning("%d connections were closed, because each reset %d calls in a second", closed, most)
            self._second, self._num_closed = second, 0
            self._counts.clear()
        self._counts[peer] += 1
        if self._counts[peer] == MAX_PER_SECOND and (found := socket_to(peer)) is not None:
            self._num_closed += 1
            # gRPC's own descriptor is for the same connection.
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()
