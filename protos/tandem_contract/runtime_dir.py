"""The runtime folder that scheduler and workers of a machine share: its rules, its sockets, and the workers' key.

Owns `worker.key`, with which workers prove that they belong to the folder. The key protects against a process that
joins by mistake, not against another program of the same user; other users can neither connect to a socket of the
folder nor create one in it.
"""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from tandem_contract import private_file

SOCKETS = WORKER_SOCKET, FRONTEND_SOCKET = "worker.sock", "frontend.sock"
KEY_NAME, KEY_BYTES = "worker.key", 32
# Linux keeps socket paths in 108 bytes, the closing zero included.
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = max(SOCKETS, key=len)
# Attempts to read a file that another program has created and not written yet.
_KEY_TRIES, _KEY_PAUSE_SECONDS = 50, 0.02


def default_runtime_dir() -> Path:
    """Returns the default folder: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tandem" if base else Path(f"/tmp/tandem-{os.getuid()}")


def own_runtime_dir(path: Path) -> None:
    """Creates the folder, or checks that only this user has access: its owner can act as the scheduler.

    Raises ValueError or OSError.
    """
    num_bytes = len(os.fsencode(path.absolute() / _LONGEST_NAME))
    if num_bytes > _MAX_SOCKET_PATH:
        raise ValueError(
            f"runtime_dir {path} is too long for a socket: with /{_LONGEST_NAME} it has {num_bytes} bytes; the limit "
            f"is {_MAX_SOCKET_PATH}"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"runtime_dir {path} is not a folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"runtime_dir {path} is a link; it must be a folder")
    if found.st_uid != os.getuid():
        raise ValueError(f"runtime_dir {path} belongs to user {found.st_uid}; it must belong to {os.getuid()}")
    if found.st_mode & 0o077:
        raise ValueError(
            f"runtime_dir {path} has mode {stat.S_IMODE(found.st_mode):04o}; it must be 0700, because others could "
            "connect to the worker's socket"
        )


def endpoint_of(folder: Path, socket: str) -> str:
    """Returns the ZeroMQ endpoint of one of the sockets."""
    return f"ipc://{folder.absolute()}/{socket}"


class KeyFile:
    """`worker.key` of a runtime folder, 32 random bytes; the first of scheduler and worker to start creates it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / KEY_NAME
        self._last = b""

    def read(self) -> bytes:
        """The key. Raises ValueError if others could have written the file, OSError if it cannot be read."""
        for _ in range(_KEY_TRIES):
            try:
                key = self._read()
            except FileNotFoundError:
                # Another program may be faster.
                with contextlib.suppress(FileExistsError):
                    self._write(secrets.token_bytes(KEY_BYTES), os.link)
                continue
            if len(key) == KEY_BYTES:
                self._last = key
                return key
            time.sleep(_KEY_PAUSE_SECONDS)
        raise ValueError(
            f"{self.path} does not have a key of {KEY_BYTES} bytes; remove it, then start the scheduler and its "
            "workers again"
        )

    def has_changed(self) -> bool:
        """Whether the file differs from the last read: a scheduler may have created the folder again."""
        try:
            return self._read() != self._last
        except (OSError, ValueError):
            return True

    def restore(self) -> None:
        """Writes the key that was read unless the file has it: workers read the file again when theirs is refused.

        Raises OSError.
        """
        if self.has_changed():
            self._write(self._last, os.replace)

    def _read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            mode = stat.S_IMODE(found.st_mode)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
                raise ValueError(
                    f"{self.path} must be a file of user {os.getuid()} with mode 0600; it belongs to user "
                    f"{found.st_uid} and has mode {mode:04o}"
                )
            return file.read(KEY_BYTES + 1)

    def _write(self, key: bytes, put: Callable[[Path, Path], None]) -> None:
        """Writes the key under another name and puts it in place, so that a reader never reads a part of it."""
        draft = self.path.with_name(f".{KEY_NAME}-{secrets.token_hex(8)}")
        try:
            with private_file.create(draft) as file:
                file.write(key)
            put(draft, self.path)
        finally:
            draft.unlink(missing_ok=True)
