"""Accepts connections into their places, and makes their TLS handshakes one after the other.

Owns the time from a connection's arrival to its protocol, and the places: how many there are, how many of them one
address may have, and which one ends when all are taken. A connection is counted when it is accepted. It is a stranger's
until its caller is known, then a guest's, and in work while it has a request that was admitted. One in work is never
ended for another one. Of the others the oldest of the larger group is: half of these places are kept for guests, and a
stranger always finds one. The costly part of a handshake, the service's answer to the first message, begins when that
message is complete, in a turn of its own of the event loop, and the addresses take turns; so a flood of handshakes
delays streams by one handshake, and the callers of other addresses by as many as there are addresses.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.settings import Settings

# The name of a connection's seat in the state of its requests.
SEAT = "seat"

# In one turn of the event loop.
_AT_ONCE = 16
_NO_FILES_SECONDS = 0.1
# A caller that does not end its TLS properly waits no longer.
_SHUTDOWN_SECONDS = 1.0
# The head of a TLS record: its kind, two bytes of version, and its length. The first record is a handshake's.
_HEAD_BYTES, _HANDSHAKE, _MAX_RECORD_BYTES = 5, 22, 16_384 + 256
# How many handshakes an address may begin at once after a pause, in seconds of its rate.
_BURST_SECONDS = 2.0
# Addresses with a remembered rate.
_MAX_ADDRESSES = 4096


@dataclass(slots=True, eq=False)
class Seat:
    address: str
    # The loop's time by which its first headers must be complete; its owner sets it.
    due_at: float = 0.0
    # Ends the connection, which then leaves.
    end: Callable[[], object] = lambda: None
    # Where the seat is now; None if it is in work, or has left.
    group: "dict[Seat, None] | None" = None


class Seats:
    def __init__(self, meter: Meter, *, max_connections: int, per_address: int = 0) -> None:
        """`per_address`: the strangers of one address; 0 does not bound them."""
        self._meter, self._max, self._per_address = meter, max_connections, per_address
        # Oldest first.
        self._strangers: dict[Seat, None] = {}
        self._guests: dict[Seat, None] = {}
        self._seated: set[Seat] = set()
        self._by_address: Counter[str] = Counter()

    def take(self, address: str) -> Seat | None:
        """Gives a stranger a place; None if its address has all of its own, or no connection can be ended for it."""
        has_all = bool(self._per_address) and self._by_address[address] >= self._per_address
        if has_all or (len(self._seated) >= self._max and not self._free_one()):
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


class Turns:
    """The order of handshakes: one in each turn of the event loop, the addresses in turns, each within its rate."""

    def __init__(self, per_second: int) -> None:
        """`per_second`: of one address; 0 does not bound them."""
        self._pause = 1 / per_second if per_second else 0.0
        # By address: the loop's time at which its burst is whole again.
        self._whole_at: dict[str, float] = {}
        # One connection of each address waits among all; the others of the address wait behind it. Both in order.
        self._of_address = WeakValueDictionary[str, asyncio.Lock]()
        self._of_all = asyncio.Lock()
        # Whether this turn of the event loop has its handshake.
        self._is_taken = False

    async def wait(self, address: str) -> None:
        """Returns when it is the turn of a connection of this address."""
        loop, of_address = asyncio.get_running_loop(), self._of_address.get(address)
        if is_first := of_address is None:
            of_address = self._of_address[address] = asyncio.Lock()
        async with of_address:
            pause = self._whole_at.get(address, 0.0) - _BURST_SECONDS - loop.time()
            if is_first or pause > 0:
                await asyncio.sleep(pause)
            async with self._of_all:
                if self._is_taken:
                    # What was given its turn before runs now, and what else is ready.
                    await asyncio.sleep(0)
                self._is_taken = True
                loop.call_soon(self._end_turn)
            if self._pause:
                now = loop.time()
                self._whole_at[address] = max(now, self._whole_at.get(address, now)) + self._pause
                if len(self._whole_at) > _MAX_ADDRESSES:
                    self._whole_at = {one: at for one, at in self._whole_at.items() if at > now}

    def _end_turn(self) -> None:
        self._is_taken = False


class Acceptor:
    """The connections of one listening socket. Make it in the event loop that uses it."""

    def __init__(
        self,
        listener: socket.socket,
        seats: Seats,
        make: Callable[[Seat], asyncio.Protocol],
        context: ssl.SSLContext | None,
        settings: Settings,
    ) -> None:
        """`make` makes the protocol of a connection. `context`: that of TLS, None without."""
        self._listener, self._seats, self._make, self._context = listener, seats, make, context
        # From a connection's arrival to its first headers.
        self._seconds = settings.head_seconds
        self._turns = Turns(settings.bounds_of_address[1])
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._open_again()

    def close(self) -> None:
        """Accepts no more, and ends connections without a protocol."""
        self._loop.remove_reader(self._listener)
        for task in list(self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until these have ended."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _open_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # No descriptor is left.
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_NO_FILES_SECONDS, self._open_again)
                return
            seat = self._seats.take(origin(peer[0]))
            if seat is None:
                connection.close()
                continue
            connection.setblocking(False)
            seat.due_at = self._loop.time() + self._seconds
            task = self._loop.create_task(self._open(connection, seat))
            seat.end = task.cancel
            self._opening.add(task)
            # A task that is cancelled before its first step runs no `finally`.
            task.add_done_callback(partial(self._opened, connection, seat))

    def _opened(self, connection: socket.socket, seat: Seat, task: "asyncio.Task[None]") -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._seats.leave(seat)
            connection.close()

    async def _open(self, connection: socket.socket, seat: Seat) -> None:
        """Gives the connection its protocol. Raises OSError (TimeoutError too) if the caller does not do its part."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            await self._loop.connect_accepted_socket(lambda: self._make(seat), connection)
            return
        async with asyncio.timeout_at(seat.due_at):
            await self._hello(connection)
            await self._turns.wait(seat.address)
            await self._loop.connect_accepted_socket(
                lambda: self._make(seat),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )

    async def _hello(self, connection: socket.socket) -> None:
        """Waits until the first TLS record is here, without reading it. Raises ConnectionAbortedError if none comes."""
        size = _HEAD_BYTES
        for _ in range(2):
            # The kernel says that the socket is readable when this many bytes are, or no more will come.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            await self._readable(connection)
            seen = connection.recv(size, socket.MSG_PEEK)
            if len(seen) < size or seen[0] != _HANDSHAKE:
                raise ConnectionAbortedError("no TLS handshake")
            size = _HEAD_BYTES + min(int.from_bytes(seen[3:_HEAD_BYTES]), _MAX_RECORD_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    async def _readable(self, connection: socket.socket) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(connection)


def origin(host: str) -> str:
    """The site of an address, as far as it shows: for IPv6 its first 64 bits."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            mapped = address.ipv4_mapped
            return str(mapped) if mapped is not None else address.packed[:8].hex()
    return host
