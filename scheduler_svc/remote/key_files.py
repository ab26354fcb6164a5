"""Makes the files with the CURVE keys of workers on other hosts. Owns the names of workers and of their folders."""

import re
from pathlib import Path

import zmq

from tandem_contract import private_file
from tandem_contract.curve_keys import (
    SCHEDULER_PUBLIC,
    SCHEDULER_SECRET,
    WORKER_SECRET,
    KeyFileError,
    check_owner,
    read_key,
)
from tandem_contract.settings import SettingError

ADMITTED, WORKERS, PUBLIC_SUFFIX = "admitted", "workers", ".public"
HOW_TO_MAKE = "`tandem keys DIR` makes keys"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def scheduler_keys(folder: Path) -> tuple[bytes, bytes]:
    """Returns the scheduler's public and secret key, Z85. Raises SettingError if the secret cannot be trusted."""
    try:
        secret = read_key(folder / SCHEDULER_SECRET, is_secret=True)
    except KeyFileError as error:
        raise SettingError(f"workers_keys: {error}; {HOW_TO_MAKE}") from None
    return zmq.curve_public(secret), secret


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
        of_scheduler = zmq.curve_public(read_key(folder / SCHEDULER_SECRET, is_secret=True))
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
