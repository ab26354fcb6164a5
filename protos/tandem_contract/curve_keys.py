"""The files with the CURVE keys of workers on other hosts: their names, their permissions, and the keys in them.

A file has one key: 40 characters (Z85) in one line. `tandem keys` makes the files, everything else reads them. A key
never appears in a message or in a log, except for public ones.
"""

import os
import stat
from pathlib import Path

SCHEDULER_SECRET, SCHEDULER_PUBLIC, WORKER_SECRET = "scheduler.secret", "scheduler.public", "worker.secret"
# Milliseconds. Each end asks the other for a sign of life; one whose cable is pulled is given up after 500 + 2,000.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HANDSHAKE_MS = 500, 2000, 3000
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY_CHARACTERS, _GROUP, _MAX_FILE_BYTES = 40, 5, 4096
_FORMAT = f"it must have one key: {_KEY_CHARACTERS} characters, Z85"


class KeyFileError(Exception):
    """A file or folder is of no use. The message has its path and what is wrong, never its content."""


def read_key(path: Path, *, is_secret: bool) -> bytes:
    """Returns the key in the file, Z85. Raises KeyFileError if there is none, or others could have written it.

    is_secret: others must not be able to read it either.
    """
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is not a file; {_FORMAT}")
            check_owner(path, status, 0o077 if is_secret else 0o022)
            key = file.read(_MAX_FILE_BYTES).strip()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    if not _is_key(key):
        raise KeyFileError(f"{path} has no key; {_FORMAT}")
    return key


def check_owner(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raises KeyFileError unless this user or root owns the file or folder and it has none of the forbidden bits."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.getuid(), 0) or mode & forbidden:
        raise KeyFileError(
            f"{path} belongs to user {status.st_uid} and has mode {mode:04o}; it must belong to user {os.getuid()} and "
            f"have mode {mode & ~forbidden:04o}"
        )


def _is_key(text: bytes) -> bool:
    """Whether this is Z85 (ZeroMQ's RFC 32) of 32 bytes: each five characters are a number below 2^32."""
    if len(text) != _KEY_CHARACTERS or not set(text) <= set(_Z85):
        return False
    groups = (text[start : start + _GROUP] for start in range(0, _KEY_CHARACTERS, _GROUP))
    return all(sum(_Z85.index(each) * 85**i for i, each in enumerate(reversed(group))) < 1 << 32 for group in groups)
