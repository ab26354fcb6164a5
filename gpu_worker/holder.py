"""`python -m gpu_worker.holder`: keeps the memory of workers' KV pools, so that it outlives them, until a signal.

Owns the process's flags, limit and exit code, the socket in the runtime folder and its connections. Only processes of
the same user are answered. The holder touches no content; `shared_pool/holder_pools.py` decides which process gets
which memory. Imports no torch: it must cost little memory and start at once.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from gpu_worker.process.machine import CGROUPS, PROC, memory_groups
from gpu_worker.shared_pool.holder_pools import Pools, User
from gpu_worker.shared_pool.messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    MAX_POOL_BYTES,
    HolderError,
    MessageError,
    close_all,
    decode,
    device_of,
    encode,
    holder_socket,
    new_socket,
    number,
    pool_id_of,
)
from tandem_contract import logs, stopping
from tandem_contract.child import die_with_parent
from tandem_contract.files import check_socket_name, default_runtime_dir, own_runtime_dir
from tandem_contract.logs import LogFormat
from tandem_contract.needed import ends_with_needed
from tandem_contract.plural import numbered
from tandem_contract.processes import WRONG_SETTINGS
from tandem_contract.settings import SHARED, Program, SettingError, Size, file, refused
from tandem_contract.stopping import StopRequests

log = logging.getLogger("gpu_worker.holder")

# The share of memory that this process may have, without a limit. The worker's own check of free memory is stricter.
_SHARE_OF_MEMORY = 0.8
# From asm-generic/socket.h; Python has no names for them before 3.14. Linux 6.5 has the second one.
_PEER_CREDENTIALS, _PEER_PIDFD = struct.Struct("3i"), 77
_MAX_CONNECTIONS = 128
_COLLECT_SECONDS = 1.0
_MAX_POOL_PAGES = 1 << 32


class HolderRuns(RuntimeError):
    """Another holder serves this runtime folder."""


class Holder:
    """Serves one runtime folder until `stop`."""

    def __init__(self, folder: Path, pools: Pools) -> None:
        """Listens. Raises HolderRuns, or OSError."""
        self._pools, self._path = pools, holder_socket(folder)
        self._users: dict[socket.socket, User] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(self._path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._mark, self._problem = _mark(self._path), ""
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def serve(self, wake: socket.socket) -> None:
        """Answers workers until `stop`, which is noticed when `wake` is readable."""
        self._selector.register(wake, selectors.EVENT_READ, lambda: None)
        try:
            while not self._stopping:
                for key, _ in self._selector.select(_COLLECT_SECONDS):
                    key.data()
                self._pools.collect(time.monotonic())
                if _mark(self._path) != self._mark:
                    self._listen_again()
        finally:
            if _mark(self._path) == self._mark:
                self._path.unlink(missing_ok=True)
            for connection in list(self._users):
                self._drop(connection)
            self._listener.close()
            self._selector.close()
            self._pools.close()

    def _listen_again(self) -> None:
        """Makes the socket again after its file or folder was removed or replaced. Connections stay."""
        try:
            own_runtime_dir(self._path.parent)
            listener = _listen(self._path)
        except (OSError, ValueError, HolderRuns) as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.info("%s was removed or replaced, and cannot be made again: %s", self._path, error)
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._mark, self._problem = listener, _mark(self._path), ""
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        log.info("%s was removed or replaced, and was made again", self._path)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        user = _user_of(connection) if len(self._users) < _MAX_CONNECTIONS else None
        if user is None:
            log.info("refused a connection: it is of another user, its process has ended, or there are too many")
            connection.close()
            return
        self._users[connection] = user
        self._selector.register(connection, selectors.EVENT_READ, partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> None:
        try:
            packet, given, _, _ = socket.recv_fds(connection, MAX_BYTES + 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, given = b"", []
        if not packet:
            close_all(given)
            self._drop(connection)
            return
        memories: list[int] = []
        try:
            # What it keeps of `given`, it removes.
            answer, memories = self._handle(decode(packet), self._users[connection], given)
        except HolderError as refusal:
            answer = {"error": str(refusal), "is_busy": refusal.is_busy}
        except (MessageError, OSError) as error:
            log.info("refused a request of process %s: %s", self._users[connection].pid, error)
            answer = {"error": str(error), "is_busy": False}
        close_all(given)
        try:
            socket.send_fds(connection, [encode(answer)], memories)
        except OSError:
            self._drop(connection)

    def _handle(self, message: dict[str, object], user: User, given: list[int]) -> tuple[dict[str, object], list[int]]:
        """Returns the answer and the descriptors that go with it."""
        now = time.monotonic()
        match message.get("want"):
            case "create":
                # A pool's user may outlive its connection, so it needs a pidfd of its own.
                num_bytes = number(message, "bytes", 1, MAX_POOL_BYTES)
                device = device_of(message)
                pages = number(message, "pages", 1, _MAX_POOL_PAGES) if device else 0
                created, memory = self._pools.create(num_bytes, user, now, device=device, num_pages=pages)
                log.info("process %s has pool %s of %s MiB", user.pid, created.hex()[:8], num_bytes >> 20)
                return {"pool_id": created.hex(), "bytes": num_bytes}, [memory]
            case "attach":
                attached, num_bytes = pool_id_of(message), number(message, "bytes", 1, MAX_POOL_BYTES)
                if len(given) != 1:
                    raise MessageError(f"{numbered(len(given), 'descriptor')} came with attach; it needs 1")
                self._pools.attach(attached, user, given[0], num_bytes)
                given.clear()
                log.info("pool %s has %s MiB on its device", attached.hex()[:8], num_bytes >> 20)
                return {}, []
            case "take":
                wanted = pool_id_of(message)
                memories, sizes = self._pools.take(wanted, user, now)
                log.info("process %s takes pool %s over", user.pid, wanted.hex()[:8])
                return {"pool_id": wanted.hex(), **sizes}, memories
            case "give back":
                self._pools.give_back(pool_id_of(message), user)
                return {}, []
            case "unused":
                self._pools.collect(now)
                num_bytes, pages = self._pools.unused_on(device_of(message))
                return {"bytes": num_bytes, "pages": pages}, []
            case "free":
                self._pools.collect(now)
                if not (device := device_of(message)):
                    raise MessageError("device is empty; pools in host memory are freed when others need their room")
                log.info(
                    "process %s needs memory: %s freed",
                    *(user.pid, numbered(self._pools.free_unused(device), "unused pool", "are")),
                )
                return {}, []
            case _:
                raise MessageError("want must be create, attach, take, give back, unused or free")

    def _drop(self, connection: socket.socket) -> None:
        del self._users[connection]
        self._selector.unregister(connection)
        connection.close()


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Identifies the file at the path; None without one. Inode numbers are used again, so it has the time too."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _listen(path: Path) -> socket.socket:
    """A listening socket in place of one that a dead holder left. Raises HolderRuns, ValueError, OSError."""
    check_socket_name(path)
    with new_socket() as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
        else:
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            raise HolderRuns(f"another holder serves {path}: process {_PEER_CREDENTIALS.unpack(credentials)[0]}")
    listener = new_socket()
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(_MAX_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def _user_of(connection: socket.socket) -> User | None:
    """The process at the other end; None if it belongs to another user or has ended."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        return None
    try:
        return User(pid=pid, pidfd=connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD))
    except OSError:
        pass
    try:
        # Without the kernel's own pidfd of the peer, the number could be another process's by now, but then its end of
        # the connection is closed.
        user = User(pid=pid, pidfd=os.pidfd_open(pid))
        is_open = bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return user
    except OSError:
        return None
    return user if is_open else None


@ends_with_needed("holder")
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 after a signal, 1 if another holder serves, 2 for settings."""
    stopping.begin()
    logs.open_closed_streams()
    try:
        settings = PROGRAM.read(arguments, os.environ)
    except SettingError as error:
        return refused("holder", error)
    if settings.exit_with_parent:
        die_with_parent()
    logs.start("holder", level="info", log_format=settings.log_format, package="gpu_worker")
    try:
        return _serve(settings)
    finally:
        logs.stop()
        stopping.end()


def _serve(settings: "HolderSettings") -> int:
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    try:
        own_runtime_dir(settings.runtime_dir)
        holder = Holder(settings.runtime_dir, Pools(settings.max_bytes))
    except (HolderRuns, ValueError, OSError) as error:
        # A socket's own error does not name it.
        folder = f"runtime_dir {settings.runtime_dir} cannot be used: "
        log.error("%s", f"{folder}{error.strerror}" if isinstance(error, OSError) else error)
        return WRONG_SETTINGS if isinstance(error, ValueError | PermissionError | NotADirectoryError) else 1
    # Workers keep what they have of it, and need it no more.
    StopRequests().listen(holder.stop)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    log.info("holds pools of at most %d MiB for the workers of %s", settings.max_bytes >> 20, settings.runtime_dir)
    holder.serve(wake)
    return 0


def default_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE_OF_MEMORY * min([machine, *(limit for limit, _ in memory_groups(proc, cgroups))]))


class HolderSettings(BaseModel):
    """All settings of `python -m gpu_worker.holder`."""

    runtime_dir: Path = Field(
        default_factory=default_runtime_dir,
        title="FOLDER",
        description="folder of the sockets; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>",
    )
    max_bytes: Annotated[Size, Field(ge=1)] = Field(
        default_factory=default_limit,
        title="SIZE",
        description="limit of host memory, such as 4GiB; default: most of what it may have",
    )
    exit_with_parent: bool = Field(False, description="end when the process that started this one ends; default: no")
    log_format: LogFormat = Field("text", title="FORMAT", description="text, or json for one JSON object per line")
    config: Path | None = file("TOML file with any of these settings")


PROGRAM = Program(
    command="python -m gpu_worker.holder",
    model=HolderSettings,
    description="Keeps the KV pools of workers.",
    prefix="TANDEM_HOLDER_",
    # The folder of the worker's settings.
    shared={"runtime_dir": ("TANDEM_WORKER_RUNTIME_DIR", *SHARED["runtime_dir"]), "log_format": SHARED["log_format"]},
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
