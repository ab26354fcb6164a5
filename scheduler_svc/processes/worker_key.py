"""The key with which workers prove that they belong to a runtime folder. Owns the file worker.key.

The first of scheduler and worker to start creates it: 32 random bytes, mode 0600. It protects against a process that
joins by mistake, not against another program of the same user.
"""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from scheduler_svc import private_file
from scheduler_svc.flags import SettingError

NAME = "worker.key"
KEY_BYTES = 32
# Attempts to read a file that another program has created and not written yet.
_TRIES, _PAUSE_SECONDS = 50, 0.02


def read_or_create(folder: Path) -> bytes:
    """Returns the key. Raises SettingError if other users could have written the file, OSError if it cannot be read."""
    path = folder / NAME
    with contextlib.suppress(FileExistsError):
        _create(path)
    for _ in range(_TRIES):
        if len(key := _read(path)) == KEY_BYTES:
            return key
        time.sleep(_PAUSE_SECONDS)
    raise SettingError(f"{path} does not have {KEY_BYTES} bytes; remove it, then start scheduler and workers again")


def restore(folder: Path, key: bytes) -> None:
    """Writes this key unless the file has it: workers read the file again when their key is refused. Raises OSError."""
    path = folder / NAME
    with contextlib.suppress(OSError, SettingError):
        if _read(path) == key:
            return
    _write(path, key, os.replace)


def _create(path: Path) -> None:
    _write(path, secrets.token_bytes(KEY_BYTES), os.link)


def _write(path: Path, key: bytes, put: Callable[[Path, Path], None]) -> None:
    """Writes the key under another name and puts it at `path`, so that a reader never reads a part of it."""
    draft = path.with_name(f".{NAME}-{secrets.token_hex(8)}")
    try:
        with private_file.create(draft) as file:
            file.write(key)
        put(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
            raise SettingError(
                f"{path} must be a file of user {os.getuid()} with mode 0600; it belongs to user {status.st_uid} and "
                f"has mode {mode:04o}"
            )
        return file.read(KEY_BYTES + 1)
