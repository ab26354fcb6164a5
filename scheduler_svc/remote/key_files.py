"""The files with the CURVE keys of workers on other hosts: their names, their permissions, and the keys in them.

A file has one key: 40 characters (Z85) in one line. `make` writes the files, everything else reads them. A key never
appears in a message or in a log, except for public ones.
"""

import os
import re
import stat
from pathlib import Path

import zmq

from scheduler_svc.flags import SettingError
from tandem_contract import private_file

SCHEDULER_SECRET, SCHEDULER_PUBLIC, WORKER_SECRET = "scheduler.secret", "scheduler.public", "worker.secret"
ADMITTED, WORKERS, PUBLIC_SUFFIX = "admitted", "workers", ".public"
HOW_TO_MAKE = "`tandem keys DIR` makes keys"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_CHARACTERS, _MAX_FILE_BYTES = 40, 4096
_FORMAT = f"it must have one key: {_KEY_CHARACTERS} characters, Z85"


class KeyFileError(Exception):
    """A file or folder is of no use. The message has its path and what is wrong, never its content."""


def scheduler_keys(folder: Path) -> tuple[bytes, bytes]:
    """Returns the scheduler's public and secret key, Z85. Raises SettingError if the secret cannot be trusted."""
    try:
        secret = _read(folder / SCHEDULER_SECRET, is_secret=True)
    except KeyFileError as error:
        raise SettingError(f"workers_keys: {error}; {HOW_TO_MAKE}") from None
    return zmq.curve_public(secret), secret


def public_key(path: Path) -> str:
    """Returns the public key in the file, Z85. Raises KeyFileError."""
    return _read(path, is_secret=False).decode("ascii")


def check_owner(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raises KeyFileError unless this user or root owns the file or folder and it has none of the forbidden bits."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.getuid(), 0) or mode & forbidden:
        raise KeyFileError(
            f"{path} belongs to user {status.st_uid} and has mode {mode:04o}; it must belong to user {os.getuid()} and "
            f"have mode {mode & ~forbidden:04o}"
        )


def _read(path: Path, *, is_secret: bool) -> bytes:
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is not a file; {_FORMAT}")
            check_owner(path, status, 0o077 if is_secret else 0o022)
            key = file.read(_MAX_FILE_BYTES).strip()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        if len(key) == _KEY_CHARACTERS:
            # Raises ValueError or ZMQError for characters that are not Z85.
            zmq.curve_public(key)
            return key
    except (ValueError, zmq.ZMQError):
        pass
    raise KeyFileError(f"{path} has no key; {_FORMAT}")


def make(folder: Path, names: list[str]) -> None:
    """Makes the keys of these workers, and those of the scheduler unless the folder has them. Raises KeyFileError."""
    for name in names:
        if not NAME.fullmatch(name):
            raise KeyFileError(
                f"{name[:80]!r} is not a name of a worker; it must have 1 to 64 letters, digits, dots, dashes or "
                "underscores and begin with a letter or digit"
            )
    try:
        for each in (folder, folder / ADMITTED, folder / WORKERS):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(each, each.stat(), 0o077)
        of_workers = {name: (folder / WORKERS / name, folder / ADMITTED / f"{name}{PUBLIC_SUFFIX}") for name in names}
        if taken := [path for paths in of_workers.values() for path in paths if path.exists()]:
            raise KeyFileError(f"{taken[0]} exists; remove it for new keys, or choose another name")
        if not (folder / SCHEDULER_SECRET).exists():
            _write(folder / SCHEDULER_SECRET, zmq.curve_keypair()[1])
        of_scheduler = zmq.curve_public(_read(folder / SCHEDULER_SECRET, is_secret=True))
        if not (folder / SCHEDULER_PUBLIC).exists():
            _write(folder / SCHEDULER_PUBLIC, of_scheduler)
        for own, admitted in of_workers.values():
            own.mkdir(mode=0o700)
            public, secret = zmq.curve_keypair()
            _write(own / WORKER_SECRET, secret)
            _write(own / SCHEDULER_PUBLIC, of_scheduler)
            _write(admitted, public)
    except OSError as error:
        raise KeyFileError(f"{error.filename or folder}: {error.strerror}") from None


def _write(path: Path, key: bytes) -> None:
    with private_file.create(path) as file:
        file.write(key + b"\n")
