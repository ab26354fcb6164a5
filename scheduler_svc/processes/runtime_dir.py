"""The folder of the sockets: created with mode 0700, owned by this user, held by one scheduler at a time.

Owns the folder's lock, and makes the folder, a socket, the key or the lock again when it is removed. Other users of the
machine can neither connect nor create a socket in the folder.
"""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from tandem_contract.files import SOCKETS, KeyFile, Locked, check_socket_name, endpoint_of, lock_file, own_runtime_dir
from tandem_contract.settings import SettingError

log = logging.getLogger("tandem.core")

_LOCK = "scheduler.lock"
# The listener of a removed socket stays open, because its connections would end with it. So this is not done for ever.
_MAX_MENDED = 64


class RuntimeDir:
    """The folder, opened at start and locked until the process ends. Peers connect to its two endpoints."""

    def __init__(self, path: Path) -> None:
        """Raises SettingError if the folder cannot be used or another scheduler holds it."""
        self.path = path.absolute()
        self._key = KeyFile(self.path)
        self._lock: int | None = None
        try:
            self._hold()
            for name in SOCKETS:
                check_socket_name(self.path / name)
            self.worker_key = self._key.read()
        except OSError as error:
            raise SettingError(f"runtime_dir {self.path} cannot be used: {error.strerror}") from None
        except ValueError as error:
            raise SettingError(str(error)) from None
        self.worker_endpoint, self.frontend_endpoint = (endpoint_of(self.path, name) for name in SOCKETS)
        self._binds: dict[Path, Callable[[], None]] = {}
        self._marks: dict[Path, tuple[int, ...] | None] = {}
        self._num_mended = 0
        # Why the folder cannot be made again.
        self._problem = ""

    def sockets_bound(self, bind_worker: Callable[[], None], bind_frontend: Callable[[], None]) -> None:
        """Remembers the files as they are now; `watch` compares them. Call it when both sockets are bound.

        The functions bind a socket again, in addition: its connections stay. They raise OSError.
        """
        binds = bind_worker, bind_frontend
        self._binds = {self.path / name: bind for name, bind in zip(SOCKETS, binds, strict=True)}
        self._remember()

    def watch(self) -> None:
        """Makes the folder, a socket, the key or the lock again if it was removed or replaced, and logs that once.

        Call it about once a second.
        """
        changed = [path for path, mark in self._marks.items() if _mark(path) != mark]
        if not changed:
            self._problem = ""
            return
        try:
            self._mend(changed)
        except (OSError, ValueError, SettingError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            if problem != self._problem:
                self._problem = problem
                log.error(
                    "%s was removed or replaced, and cannot be made again: %s; connected workers and front ends "
                    "continue, but no worker can join and no front end can be replaced",
                    *(changed[0], problem),
                )
            return
        log.warning(
            "%s was removed or replaced, and was made again: workers join, and front ends are replaced, as before",
            changed[0],
        )

    def _mend(self, changed: list[Path]) -> None:
        if self._num_mended == _MAX_MENDED:
            raise SettingError(f"this happened {_MAX_MENDED} times; restart the service")
        self._hold()
        self._key.restore()
        self._num_mended += 1
        for path in changed:
            if (bind := self._binds.get(path)) is not None:
                check_socket_name(path)
                bind()
        self._remember()

    def _remember(self) -> None:
        files = (*self._binds, self._key.path, self.path / _LOCK)
        self._marks = {path: _mark(path) for path in (self.path, *files)}

    def _hold(self) -> None:
        """Makes the folder, and takes its lock, unless it has both. Raises SettingError, ValueError, OSError."""
        own_runtime_dir(self.path)
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._lock is not None and os.path.sameopenfile(lock, self._lock):
            os.close(lock)
            return
        try:
            lock_file(lock)
        except Locked as holder:
            os.close(lock)
            raise SettingError(
                f"another scheduler{holder} holds runtime_dir {self.path}; choose another folder with --runtime-dir"
            ) from None
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock


def _mark(path: Path) -> tuple[int, ...] | None:
    """Returns a value that identifies the file at this path, None without a file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    # An inode number is reused soon, so the time is compared too. A folder's time changes with its content.
    time = () if stat.S_ISDIR(status.st_mode) else (status.st_mtime_ns,)
    return status.st_dev, status.st_ino, *time
