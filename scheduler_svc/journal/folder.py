"""The folder of a journal: of this user alone, mode 0700, held by one scheduler at a time.

Owns its lock and the names of its files. The lock's file has a byte for each crash, and one while the journal has
requests: like the journal it survives the machine, and it stays when the journal is removed or emptied.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from tandem_contract.settings import SettingError

_CRASH, _REQUESTS = b"x", b"r"
_MOST_BYTES = 64


class JournalFolder:
    """The folder, locked until `close` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Creates the folder if it does not exist. Raises SettingError if it cannot be used or is held."""
        self.path = path.absolute()
        self.current = self.path / "journal"
        """The journal. It is replaced as a whole (`aside`) or appended to."""
        self.aside = self.path / "journal.new"
        """The next journal while it is written. Left behind by a crash, it means nothing."""
        self.damaged = self.path / "journal.damaged"
        """The last journal that was damaged, for people."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_access(self.path)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SettingError(f"journal: {self.path} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                raise SettingError(f"journal: {self.path} cannot be locked: {error.strerror}") from None
            raise SettingError(
                f"journal: another scheduler holds {self.path}; choose another folder with --journal"
            ) from None
        self.has_requests = _REQUESTS in self._notes()
        """Whether the journal had requests when `mark_requests` was called last, also by an earlier scheduler."""

    @property
    def num_crashes(self) -> int:
        """Schedulers in a row that ended by an error of their own."""
        return self._notes().count(_CRASH)

    def count_crash(self) -> None:
        """Counts the end of this scheduler as a crash. On a full disk it does not count."""
        self._note(self.num_crashes + 1)

    def forget_crashes(self) -> None:
        """Begins to count anew, because a scheduler ran for a while or ended in order."""
        self._note(0)

    def mark_requests(self, has_requests: bool) -> None:
        """Notes whether the journal has requests, so that the next scheduler misses it if it is gone."""
        if has_requests != self.has_requests:
            self.has_requests = has_requests
            self._note(self.num_crashes)

    def _notes(self) -> bytes:
        return os.pread(self._lock, _MOST_BYTES, 0)

    def _note(self, num_crashes: int) -> None:
        notes = (_REQUESTS if self.has_requests else b"") + num_crashes * _CRASH
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, notes, 0)
            os.ftruncate(self._lock, len(notes))

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)

    def sync(self) -> None:
        """Makes renames in the folder durable. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_access(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SettingError(f"journal: {path} is not a folder of this user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingError(
            f"journal: {path} has mode {stat.S_IMODE(status.st_mode):04o}; it must be 0700, because others could read "
            f"prompts there: chmod 700 {path}"
        )
