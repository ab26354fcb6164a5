"""The places of connections: how many there are, how many of them one address may have, and which one ends when all
are taken.

Owns the counts. Does no I/O and knows nothing of HTTP or TLS: the owner of a connection says how it is ended. A
connection is a stranger's until its caller is known, then a guest's, and in work while it has a request that was
admitted. One in work is never ended for another one. Of the others the oldest of the larger group is: half of these
places are kept for guests, and a stranger always finds one.
"""

from collections import Counter
from collections.abc import Callable

from tandem_client.gateway.metrics import Meter

# The name of a connection's seat in the state of its requests.
SEAT = "seat"


class Seat:
    """The place of one connection."""

    __slots__ = ("address", "due_at", "end", "group")

    def __init__(self, address: str) -> None:
        self.address = address
        # The time by which its first headers must be complete; its owner sets it.
        self.due_at = 0.0
        # Ends the connection, which then leaves.
        self.end: Callable[[], object] = _nothing
        # Where the seat is now; None if it is in work, or has left.
        self.group: dict[Seat, None] | None = None


class Seats:
    """All places of one process."""

    def __init__(self, meter: Meter, *, max_connections: int, per_address: int = 0) -> None:
        """`per_address`: the strangers of one address; 0 is no bound."""
        self._meter, self._max, self._per_address = meter, max_connections, per_address
        # Oldest first.
        self._strangers: dict[Seat, None] = {}
        self._guests: dict[Seat, None] = {}
        self._seated: set[Seat] = set()
        self._by_address: Counter[str] = Counter()

    def take(self, address: str) -> Seat | None:
        """Gives a stranger a place; None if its address has all of its own, or nobody can be ended for it."""
        if self._per_address and self._by_address[address] >= self._per_address:
            self._meter.add("connections_refused")
            return None
        if len(self._seated) >= self._max and not self._free_one():
            self._meter.add("connections_refused")
            return None
        seat = Seat(address)
        self._seated.add(seat)
        self._meter.add("connections")
        self._move(seat, self._strangers)
        return seat

    def know(self, seat: Seat) -> None:
        """The caller is known."""
        if seat.group is self._strangers:
            self._move(seat, self._guests)

    def begin(self, seat: Seat) -> None:
        """A request was admitted."""
        self._move(seat, None)

    def rest(self, seat: Seat) -> None:
        """The request has its answer."""
        if seat in self._seated:
            self._move(seat, self._guests)

    def leave(self, seat: Seat) -> None:
        """The connection has ended. A second call does nothing."""
        if seat in self._seated:
            self._move(seat, None)
            self._seated.remove(seat)
            self._meter.add("connections", -1)

    def is_stranger(self, seat: Seat) -> bool:
        """Whether the caller is not known."""
        return seat.group is self._strangers

    def _free_one(self) -> bool:
        group = self._strangers if len(self._strangers) >= len(self._guests) else self._guests
        if not group:
            return False
        seat = next(iter(group))
        self._meter.add("connections_refused")
        self.leave(seat)
        seat.end()
        return True

    def _move(self, seat: Seat, group: dict[Seat, None] | None) -> None:
        if seat.group is not None:
            del seat.group[seat]
        if seat.group is self._strangers:
            self._by_address[seat.address] -= 1
            if not self._by_address[seat.address]:
                del self._by_address[seat.address]
        seat.group = group
        if group is not None:
            group[seat] = None
        if group is self._strangers:
            self._by_address[seat.address] += 1


def _nothing() -> None:
    """A connection that nobody can end yet."""
