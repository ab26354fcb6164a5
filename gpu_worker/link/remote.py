"""The scheduler on another host: the setting `connect`, the worker's CURVE keys, and why a connection was refused.

Owns the files with keys: `worker.secret` and `scheduler.public`, of 40 characters (Z85) each, as `tandem keys` makes
them. A key never appears in a log, except for public ones.
"""

import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq

WORKER_SECRET, SCHEDULER_PUBLIC = "worker.secret", "scheduler.public"
HOW_TO_MAKE = "`tandem keys DIR NAME` on the scheduler's host makes keys"
_WILDCARDS = ("0.0.0.0", "[::]", "*")
_ADDRESS = re.compile(r"tcp://(?P<host>[^\s:/]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
_KEY_CHARACTERS, _MAX_FILE_BYTES = 40, 4096
# Milliseconds. A scheduler that answers no heartbeat, because its cable is pulled, is given up after 500 + 2,000.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS, _HANDSHAKE_MS, _CONNECT_MS = 500, 2000, 3000, 1000


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
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # The kernel repeats its own attempts after pauses that grow to a minute.
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
    secret, scheduler = _read(folder / WORKER_SECRET, 0o077), _read(folder / SCHEDULER_PUBLIC, 0o022)
    return CurveKeys(scheduler=scheduler, public=zmq.curve_public(secret), secret=secret, folder=folder)


def _read(path: Path, forbidden: int) -> bytes:
    """The key in the file. Raises ValueError, which never has the content."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            key = file.read(_MAX_FILE_BYTES).strip() if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise ValueError(f"keys: {path} cannot be read: {error.strerror}; {HOW_TO_MAKE}") from None
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.getuid(), 0) or mode & forbidden:
        raise ValueError(
            f"keys: {path} belongs to user {found.st_uid} and has mode {mode:o}; it must belong to user {os.getuid()} "
            f"and have mode {mode & ~forbidden:o}"
        )
    try:
        if len(key) == _KEY_CHARACTERS:
            # Raises for characters that are not Z85.
            zmq.curve_public(key)
            return key
    except (ValueError, zmq.ZMQError):
        pass
    raise ValueError(f"keys: {path} has no key; it must have one of {_KEY_CHARACTERS} characters, Z85; {HOW_TO_MAKE}")
