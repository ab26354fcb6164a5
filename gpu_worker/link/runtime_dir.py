"""The runtime folder that scheduler and workers share: its permissions, its socket, and the key for a Join.

Owns the rules for the folder and for `worker.key`. The key protects against a process that joins by mistake, not
against another program of the same user. Knows nothing of messages.
"""

import os
import secrets
import stat
import time
from pathlib import Path

KEY_NAME, KEY_BYTES = "worker.key", 32
# Linux limits socket paths to 108 bytes, the final zero included; the scheduler's socket has the longest name.
_MAX_SOCKET_PATH, _LONGEST_NAME = 107, "frontend.sock"
# Another program may have created the file and not yet written the key.
_KEY_TRIES, _KEY_PAUSE_SECONDS = 50, 0.01


def own_runtime_dir(path: Path) -> None:
    """Creates the folder, or checks that only this user has access: its owner can act as the scheduler.

    Raises ValueError or OSError.
    """
    num_bytes = len(os.fsencode(path.absolute() / _LONGEST_NAME))
    if num_bytes > _MAX_SOCKET_PATH:
        raise ValueError(
            f"runtime_dir {path} is too long for a socket: with /{_LONGEST_NAME} it has {num_bytes} bytes; "
            f"the limit is {_MAX_SOCKET_PATH}"
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
        raise ValueError(f"runtime_dir {path} has mode {stat.S_IMODE(found.st_mode):o}; it must be 700")


def worker_endpoint(folder: Path) -> str:
    """The endpoint that workers connect to."""
    return f"ipc://{folder.absolute()}/worker.sock"


class KeyFile:
    """`worker.key` of a runtime folder, created by the scheduler or a worker, whichever starts first."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / KEY_NAME
        self._last = b""

    def read(self) -> bytes:
        """The key. Raises ValueError if the file cannot be trusted, OSError if it cannot be read."""
        for _ in range(_KEY_TRIES):
            try:
                key = _trusted_key(self._path)
            except FileNotFoundError:
                _make_key(self._path)
                continue
            if len(key) == KEY_BYTES:
                self._last = key
                return key
            time.sleep(_KEY_PAUSE_SECONDS)
        raise ValueError(
            f"{self._path} does not contain a key of {KEY_BYTES} bytes; delete it, then start the scheduler and its "
            "workers again"
        )

    def has_changed(self) -> bool:
        """Whether the file differs from the last read: a scheduler may have created the folder again."""
        try:
            return _trusted_key(self._path) != self._last
        except OSError:
            return True


def _trusted_key(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise ValueError(f"{path} must be a file of user {os.getuid()}; it belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise ValueError(f"{path} has mode {stat.S_IMODE(found.st_mode):o}; it must be 600")
        return file.read(KEY_BYTES + 1)


def _make_key(path: Path) -> None:
    """Writes a new key, unless another program was faster.

    The key is written under another name and then linked, so that no reader finds an incomplete key.
    """
    whole = path.with_name(f".{KEY_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(whole, path)
    except FileExistsError:
        pass
    finally:
        whole.unlink(missing_ok=True)
