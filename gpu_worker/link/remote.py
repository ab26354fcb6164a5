"""The scheduler on another host: the setting `connect`, the worker's CURVE keys, and why a connection was refused."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq

from tandem_contract.files import (
    HANDSHAKE_MS,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    SCHEDULER_PUBLIC,
    WORKER_SECRET,
    KeyFileError,
    read_key,
)

HOW_TO_MAKE = "`tandem keys DIR NAME` on the scheduler's host makes keys"
_WILDCARDS = ("0.0.0.0", "[::]", "*")
_ADDRESS = re.compile(r"tcp://(?P<host>[^\s:/]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
# The kernel repeats its own attempts after pauses that grow to a minute.
_CONNECT_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The keys of a connection, Z85."""

    scheduler: bytes
    public: bytes
    secret: bytes = field(repr=False)
    folder: Path

    def configure(self, socket: "zmq.Socket[bytes]") -> None:
        """Sets the options of a socket before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.scheduler)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)

    def of_group(self) -> "CurveKeys":
        """The keys for another process with these keys."""
        return replace(self, scheduler=self.public)

    def why_refused(self, *, by_scheduler: bool) -> str:
        """Returns why a handshake failed. `by_scheduler`: it refused this worker's key."""
        if by_scheduler:
            return (
                f"it does not admit this worker's public key {self.public.decode('ascii')}; put the key into a file "
                "NAME.public of its folder admitted/"
            )
        return (
            f"the handshake failed: {self.folder / SCHEDULER_PUBLIC} may be the key of another scheduler, or the port "
            "that of another program"
        )


class NoKey:
    """Stands for the `KeyFile` of a runtime folder: CURVE has already proved who this worker is."""

    def read(self) -> bytes:
        """No key."""
        return b""

    def has_changed(self) -> bool:
        """It never changes."""
        return False


def check_address(connect: str) -> None:
    """Raises ValueError unless the address is tcp://HOST:PORT."""
    matched = _ADDRESS.fullmatch(connect)
    if matched is None or not 0 < int(matched["port"]) < 1 << 16:
        raise ValueError(f"connect is {connect}; it must be tcp://HOST:PORT with a port from 1 to 65535")
    if matched["host"] in _WILDCARDS:
        raise ValueError(
            f"connect is {connect}, every address of a machine; name one at which the scheduler listens, such as "
            f"tcp://127.0.0.1:{matched['port']} on this machine"
        )


def read_keys(folder: Path | None, connect: str) -> CurveKeys:
    """The keys in the folder. Raises ValueError."""
    if folder is None:
        raise ValueError(f"connect is {connect} and keys is not set; over TCP a worker needs keys: {HOW_TO_MAKE}")
    try:
        secret = read_key(folder / WORKER_SECRET, is_secret=True)
        scheduler = read_key(folder / SCHEDULER_PUBLIC, is_secret=False)
    except KeyFileError as error:
        raise ValueError(f"keys: {error}; {HOW_TO_MAKE}") from None
    return CurveKeys(scheduler=scheduler, public=zmq.curve_public(secret), secret=secret, folder=folder)
