"""The address that callers reach: which are allowed, and holding one for several front ends.

Owns the rule that only loopback will do, and the sockets that keep a port for this service. Knows nothing of gRPC.
"""

import errno
import ipaddress
import socket
import sys

# Of ports that the system chose: another may take one before it is held.
_TRIES = 16


class ListenError(Exception):
    """The address cannot be used; the message says why, the address last."""


def split(listen: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ListenError where it is none, or not this machine's alone.

    Only loopback addresses: anybody who reaches the port may use the service, until TLS and tokens are built.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ListenError(
            f"an address looks like 127.0.0.1:50051, with a port between 0 and 65535; this does not: {listen}"
        )
    if not _is_loopback(host):
        raise ListenError(
            f"this version has neither TLS nor tokens, so it listens on loopback addresses only"
            f" (127.0.0.1, [::1], localhost), not on {listen}"
        )
    return host, int(port)


def taken(listen: str) -> ListenError:
    """What to raise where it cannot be bound."""
    return ListenError(
        f"the port is taken, or the address is not this machine's; choose another with --listen (127.0.0.1:0 lets"
        f" the system choose): cannot listen on {listen}"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return False


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


class HeldAddress:
    """An address that front ends share with SO_REUSEPORT, and that no other service of this kind takes or shares.

    Alone that option lets every process of this user share a port in silence, a second Tandem too, whose callers would
    then reach one or the other by chance; it holds an address first, and that fails while this is held, as it does for
    every program that does not ask to share. One that does, as gRPC's servers do unless told otherwise, the kernel lets
    in as long as it is this user's: no socket of ours can keep it out. The held sockets never listen, so no caller
    reaches them.
    """

    def __init__(self, listen: str) -> None:
        """`listen` as for `split`; of port 0 the system makes one port for all front ends. Raises ListenError."""
        if sys.platform != "linux":
            raise ListenError(f"several front ends share an address on Linux alone: cannot listen on {listen}")
        host, port = split(listen)
        self._sockets: list[socket.socket] = []
        for attempt in range(_TRIES):
            try:
                chosen = port or _free_port(host)
                self._sockets = _hold_all(host, chosen)
            except OSError:
                if port or attempt == _TRIES - 1:
                    raise taken(listen) from None
                continue
            self.listen = f"{host}:{chosen}"
            return

    def close(self) -> None:
        """Lets go of it."""
        for one in self._sockets:
            one.close()


def _resolved(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """Family and address of each that the host's name stands for: gRPC binds them all."""
    found = socket.getaddrinfo(_bare(host), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), (str(where[0]), port)) for family, _, _, _, where in found))


def _free_port(host: str) -> int:
    family, where = _resolved(host, 0)[0]
    with socket.socket(family) as chosen:
        chosen.bind(where)
        return chosen.getsockname()[1]


def _hold_all(host: str, port: int) -> list[socket.socket]:
    held: list[socket.socket] = []
    try:
        for family, where in _resolved(host, port):
            try:
                held.append(_hold(family, where))
            except OSError as error:
                # localhost is ::1 by name also where there is no IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not held:
            raise OSError(errno.EADDRNOTAVAIL, "no address can be bound")
    except OSError:
        for one in held:
            one.close()
        raise
    return held


def _hold(family: int, where: tuple[str, int]) -> socket.socket:
    """A bound socket beside which only sockets with SO_REUSEPORT can be bound. Raises OSError where the port is taken.

    SO_REUSEADDR, because the connections of a service that just ended linger. It lets two bind at the same moment, but
    only one of them listen; from then on it is off, and nobody else can bind either. What stops to listen stays bound.
    """
    held = socket.socket(family)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(where)
        held.listen(1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.shutdown(socket.SHUT_RD)
    except OSError:
        held.close()
        raise
    return held
