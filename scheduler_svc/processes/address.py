"""The address that callers reach: which addresses are allowed, and how one is held for the front ends.

Owns the rule that other addresses than loopback need TLS and tokens, and the sockets that reserve a port for this
service. Does not know gRPC.
"""

import contextlib
import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence

from tandem_contract.address import host_and_port

# Whether processes of one service can share an address.
CAN_SHARE = sys.platform == "linux"
# Attempts with a port that the system chose, because another program may take the port before it is held.
_TRIES = 16
# An address of this machine at which no program listens; see `HeldAddress.share`.
_UNUSED_LOOPBACK = "127.255.255.254"
_REASONS = {
    errno.EADDRINUSE: "the port is taken",
    errno.EADDRNOTAVAIL: "the address does not belong to this machine",
    errno.EACCES: "this user may not use the port",
}


class ListenError(Exception):
    """The address cannot be used. The message has the cause first and the address last; `setting` named the address."""

    def __init__(self, message: str, *, flag: str = "--listen") -> None:
        super().__init__(message)
        self.setting = flag.removeprefix("--").replace("-", "_")


def missing_flags(*, has_tls: bool, has_tokens: bool) -> tuple[str, ...]:
    """Returns the flags that are missing for an address that other machines reach."""
    return (*(() if has_tls else ("--tls-cert", "--tls-key")), *(() if has_tokens else ("--tokens",)))


NOTHING_GIVEN = missing_flags(has_tls=False, has_tokens=False)


def split(listen: str, *, missing: Sequence[str] = NOTHING_GIVEN, flag: str = "--listen") -> tuple[str, int]:
    """Returns host and port of `host:port`. Raises ListenError if it is malformed; `flag` named it.

    So it does if `missing` names flags and the address is not a loopback address: without TLS and tokens, every program
    that reaches the port could read all traffic and use the service.
    """
    try:
        host, port = host_and_port(listen, "127.0.0.1:50051")
    except ValueError as error:
        raise ListenError(f"it {error}", flag=flag) from None
    if missing and not is_loopback(listen):
        flags = f"{', '.join(missing[:-1])} and {missing[-1]} are" if len(missing) > 1 else f"{missing[0]} is"
        raise ListenError(
            f"{flags} missing: without TLS and tokens the service listens on loopback addresses only (127.0.0.1, [::1] "
            f"or localhost); it cannot listen on {listen}",
            flag=flag,
        )
    return host, port


def taken(listen: str, error: OSError | None = None, *, flag: str = "--listen") -> ListenError:
    """Returns the exception for an address that cannot be bound; without `error` the cause is unknown."""
    reason = "the port is taken, or the address does not belong to this machine"
    if error is not None and error.errno is not None:
        reason = _REASONS.get(error.errno) or error.strerror or reason
    return ListenError(
        f"{reason}; choose another with {flag} (127.0.0.1:0 takes a free port): cannot listen on {listen}", flag=flag
    )


def is_loopback(listen: str) -> bool:
    """Whether only programs of this machine reach `host:port`."""
    host = listen.rpartition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return False


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


class HeldAddress:
    """An address that front ends bind with SO_REUSEPORT, reserved for this service also while no front end runs.

    The held sockets never listen, so no caller reaches them. While the address is held, the kernel refuses programs
    that do not share ports, and another Tandem, which holds its address first. A program that shares ports, as other
    gRPC servers of the same user do by default, can bind the address only while front ends are started: see
    `share`. Outside Linux the address is checked and not held, and one front end has it.
    """

    def __init__(
        self, listen: str, *, num_sharing: int = 1, missing: Sequence[str] = NOTHING_GIVEN, flag: str = "--listen"
    ) -> None:
        """`listen` is `host:port`; for port 0 the system chooses one port for all front ends. Raises ListenError."""
        host, port = split(listen, missing=missing, flag=flag)
        if num_sharing > 1 and not CAN_SHARE:
            said = f"several front ends can share an address on Linux only: cannot listen on {listen}"
            raise ListenError(said, flag=flag)
        self._sockets: list[socket.socket] = []
        for attempt in range(_TRIES):
            try:
                self._port = port or _free_port(host)
                self._sockets = _hold_all(host, self._port)
            except OSError as error:
                if port or attempt == _TRIES - 1:
                    raise taken(listen, error, flag=flag) from None
                continue
            self.listen = f"{host}:{self._port}"
            break
        if not CAN_SHARE:
            self.close()

    def share(self, *, is_on: bool) -> None:
        """Lets front ends bind the address; off, every other program is refused. Those that listen are not affected.

        The kernel compares a new socket with every bound socket only if the last one bound does not share. So a socket
        that does not share is bound for a moment, at an address that no program uses.
        """
        for one in self._sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_on))
        if is_on or not self._sockets:
            return
        # If a program does use that address, sharing stays possible, as without this method.
        with contextlib.suppress(OSError), socket.socket() as unshared:
            unshared.bind((_UNUSED_LOOPBACK, self._port))

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


def _resolved(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """Returns family and address of each address of the host name, because gRPC binds all of them."""
    entries = socket.getaddrinfo(_bare(host), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), (str(where[0]), port)) for family, _, _, _, where in entries))


def _free_port(host: str) -> int:
    family, where = _resolved(host, 0)[0]
    with socket.socket(family) as chosen:
        chosen.bind(where)
        return chosen.getsockname()[1]


def _hold_all(host: str, port: int) -> list[socket.socket]:
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for family, where in _resolved(host, port):
            try:
                held.append(stack.enter_context(_hold(family, where)))
            except OSError as error:
                # localhost resolves to ::1 also on machines without IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not held:
            raise OSError(errno.EADDRNOTAVAIL, "no address can be bound")
        stack.pop_all()
    return held


def _hold(family: int, where: tuple[str, int]) -> socket.socket:
    """Binds a socket beside which only sockets with SO_REUSEPORT can be bound. Raises OSError if the port is taken.

    SO_REUSEADDR is needed because connections of a service that just ended stay for a while. With it two sockets can
    bind at the same moment, but only one of them can listen. That one turns the option off, so no other socket can
    bind. A socket that stops listening stays bound.
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
