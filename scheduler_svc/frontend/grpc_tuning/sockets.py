"""Owns what gRPC calls a peer, and what is done with its socket: messages are held to be one packet, hosts are barred.

A peer is `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT` (grpcio 1.85.1); of a Unix socket it has no host. gRPC does not
give out its sockets, so they are found by their addresses among the files of this process, and a duplicate is handed
out.

**Corks.** The small messages of one turn of the event loop leave their connection in one packet. gRPC makes a system
call for each message, and each call wakes the reader. While TCP_CORK is set, the kernel keeps what is written; it sends
all of it when the option is cleared. A cork works on a duplicate of the connection's socket. It closes the duplicate
when the last call of the connection leaves, so the connection does not outlive gRPC's own socket for long. A connection
without a known socket, such as one of a Unix socket, is served without a cork.

**Barred hosts** may open no new connection for a time: the kernel drops the packets that would open one. gRPC accepts
every connection, so the bar is a filter on its listening sockets (classic BPF, which needs no rights). It sees the
first packet of a connection and compares its source. Connections that are open are not filtered. A caller's kernel
repeats the packet, so other callers of the attacker's host are served when the time is over.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import ipaddress
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

# A site has these bits of an IPv6 address; one host may have all the others.
_NETWORK_BITS = {4: 32, 6: 64}
# This process's open files, on Linux.
FILES = "/proc/self/fd"
# A file is looked at in 2 us, on the event loop.
MAX_FILES = 8_192

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@functools.lru_cache(maxsize=4096)
def network_of(peer: str) -> Network | None:
    """The host that a peer belongs to, as far as its address shows; for IPv6 its network of 64 bits."""
    host, _ = _split(peer)
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return ipaddress.ip_network((address, _NETWORK_BITS[address.version]), strict=False)


def sockets_to(peers: Collection[str], max_files: int = MAX_FILES) -> dict[str, socket.socket]:
    """Duplicates of this process's TCP sockets to these peers, as far as they are found; none among more files."""
    wanted = {_split(peer): peer for peer in peers}
    by_peer: dict[str, socket.socket] = {}
    for one in _sockets(max_files):
        # gRPC listens on IPv6 sockets and writes an IPv4 peer without this prefix.
        with contextlib.suppress(OSError):
            host, port = one.getpeername()[:2]
            # Other files of the connection are duplicates, such as those of `Corks`.
            if (peer := wanted.pop((host.removeprefix("::ffff:"), str(port)), None)) is not None:
                by_peer[peer] = one
                if not wanted:
                    break
                continue
        one.close()
    return by_peer


def listeners(port: int) -> list[socket.socket]:
    """Duplicates of this process's sockets that listen at the port."""
    sockets: list[socket.socket] = []
    for one in _sockets(MAX_FILES):
        with contextlib.suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
                sockets.append(one)
                continue
        one.close()
    return sockets


def _split(peer: str) -> tuple[str, str]:
    family, _, address = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return "", ""
    host, _, port = address.replace("%5B", "[").replace("%5D", "]").rpartition(":")
    return host.strip("[]"), port


def _sockets(max_files: int) -> Iterator[socket.socket]:
    files = [int(name) for name in os.listdir(FILES)] if os.path.isdir(FILES) else []
    # Only duplicates are asked: gRPC's threads may close the files meanwhile. Their numbers are none of the list's.
    for file in files if len(files) <= max_files else []:
        try:
            duplicate = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(files) + 1)
        except OSError:
            continue
        try:
            one = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
            yield one
        else:
            one.close()


# Calls of a connection from which it is corked: with one call, a turn rarely has two messages.
MIN_CALLS = 2
# Messages that leave together at most, so that the first one does not wait for a long turn: some 3 ms of work.
MAX_HELD = 64
# Each takes one more file, out of `options.SPARE_FILES`.
MAX_CORKED = 64
# A connection's socket is looked for once, on the event loop, among at most this many files: 2 us each.
MAX_CORK_FILES = 1024


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
        peer = context.peer()
        connection = self._connections.setdefault(peer, Connection(peer))
        connection.num_calls += 1
        if connection.num_calls == MIN_CALLS and connection.duplicate is None and self._num_corked < self._max_corked:
            connection.duplicate = sockets_to([peer], MAX_CORK_FILES).get(peer)
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


logger = logging.getLogger(__name__)

BAR_SECONDS = 5.0
# One more takes the place of the oldest. The filter's jumps reach 255 instructions.
MAX_BARRED = 48

# linux/filter.h: load a byte or a word of the packet, shift, jump if equal, jump, return.
_BYTE, _WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
# Offsets from here count from the network header, SKF_NET_OFF.
_HEADER = 0xFFF00000
_SOURCE = {4: _HEADER + 12, 6: _HEADER + 8}
_DROP, _KEEP = 0, 0xFFFFFFFF
# asm-generic/socket.h.
_ATTACH, _DETACH = 26, 27

_Instruction = tuple[int, int, int, int]


class BarredHosts:
    """The hosts barred from this process's ports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By port, the end of each bar, the oldest first.
        self._until: dict[int, dict[Network, float]] = {}

    def bar(self, network: Network, port: int) -> None:
        """Bars the network from the port for BAR_SECONDS."""
        barred = self._until.setdefault(port, {})
        barred.pop(network, None)
        if len(barred) >= MAX_BARRED:
            del barred[next(iter(barred))]
        barred[network] = self._clock() + BAR_SECONDS
        _filter(port, barred)

    def sweep(self) -> None:
        """Ends bars that are over. The owner calls this about once a second."""
        now = self._clock()
        for port, barred in list(self._until.items()):
            over = [network for network, until in barred.items() if until <= now]
            for network in over:
                del barred[network]
            if over:
                _filter(port, barred)
            if not barred:
                del self._until[port]


def program(networks: Collection[Network]) -> list[_Instruction]:
    """The filter that drops packets from these networks."""
    sixth = [*_comparisons([one for one in networks if one.version == 6]), (_RETURN, 0, 0, _KEEP)]
    fourth = [*_comparisons([one for one in networks if one.version == 4]), (_RETURN, 0, 0, _KEEP)]
    return [(_BYTE, 0, 0, _HEADER), (_SHIFT_RIGHT, 0, 0, 4), (_IF_EQUAL, len(fourth), 0, 6), *fourth, *sixth]


def _comparisons(networks: Collection[Network]) -> list[_Instruction]:
    instructions: list[_Instruction] = []
    for network in networks:
        words = struct.unpack(">I" if network.version == 4 else ">II", network.network_address.packed[:8])
        for idx, word in enumerate(words):
            # After a word that differs, the next network is compared.
            left = 2 * (len(words) - 1 - idx) + 1
            instructions += [(_WORD, 0, 0, _SOURCE[network.version] + 4 * idx), (_IF_EQUAL, 0, left, word)]
        instructions.append((_RETURN, 0, 0, _DROP))
    return instructions


def _filter(port: int, networks: Collection[Network]) -> None:
    instructions = program(networks)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    for one in listeners(port) if sys.platform == "linux" else []:
        with one:
            try:
                if networks:
                    filled = struct.pack("@HP", len(instructions), ctypes.addressof(code))
                    one.setsockopt(socket.SOL_SOCKET, _ATTACH, filled)
                else:
                    one.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            except OSError as error:
                logger.warning("the filter of barred hosts at port %d could not be set: %s", port, error)
