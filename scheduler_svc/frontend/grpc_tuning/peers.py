"""Owns what gRPC calls a peer: its host, its network, and its socket among the files of this process.

A peer is `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT` (grpcio 1.85.1); of a Unix socket it has no host. gRPC does not
give out its sockets, so they are found by their addresses, and a duplicate is handed out.
"""

import contextlib
import fcntl
import functools
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator

# A site has these bits of an IPv6 address; one host may have all the others.
_NETWORK_BITS = {4: 32, 6: 64}
# This process's open files, on Linux.
FILES = "/proc/self/fd"
# A file is looked at in 2 us, on the event loop.
MAX_FILES = 8_192

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@functools.lru_cache(maxsize=4096)
def network_of(peer: str) -> Network | None:
    """Whom a peer belongs to, as far as one can tell: its host, or of IPv6 its network of 64 bits."""
    host, _ = _split(peer)
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return ipaddress.ip_network((address, _NETWORK_BITS[address.version]), strict=False)


def sockets_to(peers: Collection[str], max_files: int = MAX_FILES) -> dict[str, socket.socket]:
    """Duplicates of this process's TCP sockets to these peers, as far as they are found; none among more files."""
    wanted = {_split(peer): peer for peer in peers}
    found: dict[str, socket.socket] = {}
    for one in _sockets(max_files):
        # gRPC listens on IPv6 sockets and writes an IPv4 peer without this prefix.
        with contextlib.suppress(OSError):
            host, port = one.getpeername()[:2]
            # Other files of the connection are duplicates, such as those of `corks`.
            if (peer := wanted.pop((host.removeprefix("::ffff:"), str(port)), None)) is not None:
                found[peer] = one
                if not wanted:
                    break
                continue
        one.close()
    return found


def listeners(port: int) -> list[socket.socket]:
    """Duplicates of this process's sockets that listen at the port."""
    found: list[socket.socket] = []
    for one in _sockets(MAX_FILES):
        with contextlib.suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
                found.append(one)
                continue
        one.close()
    return found


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
