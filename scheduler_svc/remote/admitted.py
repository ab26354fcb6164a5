"""The public keys of the workers that may join from other hosts: a folder of files NAME.public, read again on change.

Owns the present keys. A file that is removed, or that no longer has a key, admits nobody; a folder that cannot be read
changes nothing but the log.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from scheduler_svc.remote.key_files import HOW_TO_MAKE, NAME, PUBLIC_SUFFIX
from tandem_contract.curve_keys import KeyFileError, check_owner, read_key
from tandem_contract.settings import SettingError

log = logging.getLogger("tandem.core")

MAX_KEYS = 1024
# What tells that a file has changed: name, inode, size, time, mode.
_State = tuple[tuple[str, int, int, int, int], ...]


class AdmittedKeys:
    """`names` maps each admitted key (Z85) to its file's name. Replaced, never changed: threads may read it."""

    def __init__(self, folder: Path) -> None:
        """Checks the folder; `poll` reads it. Raises SettingError if it cannot be read, or others can write it."""
        self._folder = folder
        self._state: _State | None = None
        self._problem = ""
        self.names: Mapping[str, str] = {}
        try:
            self._found()
        except (OSError, KeyFileError) as error:
            raise SettingError(f"workers_keys: {_reason(folder, error)}; {HOW_TO_MAKE}") from None

    def poll(self) -> None:
        """Reads the folder again if it has changed."""
        try:
            self._read_again()
            self._problem = ""
        except (OSError, KeyFileError) as error:
            problem = _reason(self._folder, error)
            if problem != self._problem:
                self._problem = problem
                log.error("workers_keys: %s; the keys read before stay in force", problem)

    def _found(self) -> _State:
        """Returns the files of keys, in the order of their names. Raises OSError, KeyFileError."""
        check_owner(self._folder, self._folder.stat(), 0o022)
        # Three times as fast as pathlib, every second.
        with os.scandir(self._folder) as entries:
            state = sorted(_state_of(entry) for entry in entries if entry.name.endswith(PUBLIC_SUFFIX))
        if len(state) > MAX_KEYS:
            raise KeyFileError(f"{self._folder} has {len(state):,} keys; the limit is {MAX_KEYS:,}")
        return tuple(state)

    def _read_again(self) -> None:
        state = self._found()
        if state == self._state:
            return
        before, self._state = self.names, state
        names = dict[str, str]()
        for file, *_ in state:
            path, name = self._folder / file, file.removesuffix(PUBLIC_SUFFIX)
            try:
                if not NAME.fullmatch(name):
                    raise KeyFileError(f"{path} is not named like a worker")
                names[read_key(path, is_secret=False).decode("ascii")] = name
            except KeyFileError as error:
                log.warning("workers_keys: %s; it admits nobody", error)
        self.names = names
        removed = sorted(name for key, name in before.items() if key not in names)
        if removed:
            log.warning("workers_keys: the keys of %s are no longer admitted", _listed(removed))
        log.info("workers_keys: %d workers of other hosts may join", len(names))


def _state_of(entry: os.DirEntry[str]) -> tuple[str, int, int, int, int]:
    try:
        found = entry.stat()
    except FileNotFoundError:
        return entry.name, 0, 0, 0, 0
    return entry.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _reason(folder: Path, error: OSError | KeyFileError) -> str:
    if isinstance(error, KeyFileError):
        return str(error)
    return f"{os.fspath(error.filename or folder)} cannot be read: {error.strerror}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} others" if len(names) > 8 else shown
