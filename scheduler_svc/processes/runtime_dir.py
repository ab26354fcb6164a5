"""The folder of the sockets: created with mode 0700, owned by this user, held by one scheduler at a time.

Owns the folder's lock, and detects when the folder, a socket or the key is removed. Other users of the machine can
neither connect nor create a socket in the folder.
"""

import fcntl
import logging
import os
import stat
from pathlib import Path

from scheduler_svc.flags import SettingError
from scheduler_svc.processes import worker_key

log = logging.getLogger("tandem.core")

# Linux keeps socket paths in 108 bytes, the closing zero included.
_MAX_SOCKET_PATH = 107
_SOCKETS = ("worker.sock", "frontend.sock")
_LONGEST_NAME = max(_SOCKETS, key=len)


class RuntimeDir:
    """The folder, opened at start and locked until the process ends. Peers connect to its two endpoints."""

    def __init__(self, path: Path) -> None:
        """Raises SettingError if the folder cannot be used or another scheduler holds it."""
        path = path.absolute()
        _check_length(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_access(path)
            self._lock = os.open(path / "scheduler.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.worker_key = worker_key.read_or_create(path)
        except BlockingIOError:
            raise SettingError(
                f"another scheduler holds runtime_dir {path}; choose another folder with --runtime-dir"
            ) from None
        except OSError as error:
            raise SettingError(f"runtime_dir {path} cannot be used: {error.strerror}") from None
        self.path = path
        self.worker_endpoint, self.frontend_endpoint = (f"ipc://{path}/{name}" for name in _SOCKETS)
        self._marks: dict[Path, tuple[int, ...] | None] = {}
        self._missing: Path | None = None

    def sockets_bound(self) -> None:
        """Remembers the files as they are now; `watch` compares them. Call it when both sockets are bound."""
        names = (*_SOCKETS, worker_key.NAME)
        self._marks = {path: _mark(path) for path in (self.path, *(self.path / name for name in names))}

    def watch(self) -> None:
        """Logs when the folder, a socket or the key is removed or replaced, and when it is back."""
        missing = next((path for path, mark in self._marks.items() if _mark(path) != mark), None)
        if missing is not None and self._missing is None:
            log.error(
                "%s was removed or replaced: connected workers and front ends continue, but no worker can join and no "
                "front end can be replaced; move it back, or restart the service",
                missing,
            )
        elif missing is None and self._missing is not None:
            log.warning("%s is back: workers can join again", self._missing)
        self._missing = missing


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path / _LONGEST_NAME))
    if length > _MAX_SOCKET_PATH:
        raise SettingError(
            f"runtime_dir {path} is too long for a socket: with /{_LONGEST_NAME} it has {length} bytes; the limit is "
            f"{_MAX_SOCKET_PATH}"
        )


def _check_access(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SettingError(f"runtime_dir {path} is not a folder of this user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingError(
            f"runtime_dir {path} has mode {stat.S_IMODE(status.st_mode):04o}; it must be 0700, because others could "
            "connect to the worker's socket"
        )


def _mark(path: Path) -> tuple[int, ...] | None:
    """Returns a value that identifies the file at this path, None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    # An inode number is reused soon, so the time is compared too. A folder's time changes with its content.
    time = () if stat.S_ISDIR(status.st_mode) else (status.st_mtime_ns,)
    return status.st_dev, status.st_ino, *time
