"""The folder of a journal: of this user alone, mode 0700, held by one scheduler at a time.

Owns its lock and the names of its files.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from scheduler_svc.flags import SettingError


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

    @property
    def num_crashes(self) -> int:
        """Schedulers in a row that ended by an error of their own. The lock's file has a byte for each."""
        return os.fstat(self._lock).st_size

    def count_crash(self) -> None:
        """Counts the end of this scheduler as a crash. On a full disk it does not count."""
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, b"x", self.num_crashes)

    def forget_crashes(self) -> None:
        """Begins to count anew, because a scheduler ran for a while or ended in order."""
        os.ftruncate(self._lock, 0)

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
