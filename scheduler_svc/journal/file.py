"""The journal on the disk: its folder, the format of its file, and what appends to it and rewrites it.

Knows nothing of requests: payloads are bytes, and `snapshot` returns the payloads of a file that contains only what is
alive. Owns the folder's lock, the names in it, the file, and the thread that waits for the disk.

**Format.** That of `wire/framing`. The tokens of a frame that is torn had not been sent.

**Lock.** Its file has a byte for each crash, and one while the journal has requests: like the journal it survives the
machine, and it stays when the journal is removed or emptied.

**Rewriting.** The next file is written aside with a snapshot and synced to the disk in a thread. Meanwhile every append
goes to both files. Then it replaces the current one by a rename, so a crash at any point leaves one complete journal.

**Suspension.** If a write fails (a full disk) or the live content exceeds the limit, the current file is removed,
because an old journal would bring requests back without tokens that their callers have seen. Streams continue, and
`suspended` says why. A snapshot is tried again every few seconds; when it succeeds, the journal is complete again.
"""

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum
from pathlib import Path

from scheduler_svc.wire.framing import Format, frame
from tandem_contract.files import Locked, lock_file
from tandem_contract.needed import started
from tandem_contract.settings import SettingError

FORMAT = Format("journal", 1)
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
            lock_file(self._lock)
        except OSError as error:
            os.close(self._lock)
            raise SettingError(f"journal: {self.path} cannot be locked: {error.strerror}") from None
        except Locked as holder:
            os.close(self._lock)
            raise SettingError(
                f"journal: another scheduler{holder} holds {self.path}; choose another folder with --journal"
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
        """Begins to count from zero, because a scheduler ran for a while or ended in order."""
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


log = logging.getLogger("tandem.core")

# A file is rewritten when it is larger than this and than `_GROWTH` times its size after the last rewriting.
_SMALL_BYTES, _GROWTH = 4 << 20, 3
# Content of dropped requests stays in the file no longer than this.
_ERASE_SECONDS = 30.0
_RETRY_SECONDS = 5.0
_SYNC_SECONDS = 1.0
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class Sync(StrEnum):
    """When appended records are forced to the disk. It matters only if the machine dies, not if the process does."""

    OFF = "off"
    SECOND = "second"
    STEP = "step"


@dataclass(slots=True, eq=False)
class _File:
    """An open journal file and its size."""

    descriptor: int
    write: Callable[[int, bytes], int]
    size: int = 0

    def append(self, data: bytes) -> None:
        """Writes all of `data`. Raises OSError; the file then ends with a part of it."""
        self.size += len(data)
        while (written := self.write(self.descriptor, data)) < len(data):
            data = data[written:]

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True, eq=False, repr=False)
class JournalWriter:
    """The journal of a running scheduler. No method raises OSError. Times are on the core's clock."""

    folder: JournalFolder
    _: KW_ONLY
    snapshot: Callable[[], Iterable[bytes]]
    max_bytes: int
    sync: Sync
    now: InitVar[float]
    # os.write, or a test's.
    write: Callable[[int, bytes], int] = os.write
    # One sentence while nothing is written, otherwise empty.
    suspended: str = field(default="", init=False)
    _file: _File | None = field(default=None, init=False)
    _next: _File | None = field(default=None, init=False)
    _syncing: "_Syncing | None" = field(default=None, init=False)
    _base_bytes: int = field(default=0, init=False)
    _dead_since: float | None = field(default=None, init=False)
    _dirty: bool = field(default=False, init=False)
    _synced_at: float = field(default=0.0, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _is_closing: bool = field(default=False, init=False)

    def __post_init__(self, now: float) -> None:
        """Replaces the folder's journal by a snapshot."""
        self._synced_at = self._retry_at = now
        self._rewrite(now, wait=True)

    @property
    def size(self) -> int:
        """Bytes of the current file; 0 while the journal is suspended."""
        return 0 if self._file is None else self._file.size

    def append(self, payloads: Iterable[bytes], now: float, *, drops: bool = False) -> None:
        """Writes the payloads with one system call. `drops`: some content of the file is dead from now on."""
        if drops and self._dead_since is None:
            self._dead_since = now
        if self._file is None:
            return
        try:
            data = b"".join(map(frame, payloads))
            for file in filter(None, (self._file, self._next)):
                file.append(data)
                if self.sync is Sync.STEP:
                    os.fdatasync(file.descriptor)
        except OSError as error:
            self._suspend(f"cannot be written: {error.strerror}", now)
            return
        self._dirty = True
        if self.size > self.max_bytes:
            self._finish(now, wait=True)
            if self.size > self.max_bytes:
                self._rewrite(now, wait=True)

    def mark_requests(self, has_requests: bool) -> None:
        """Notes whether the file has requests, for the case that it is removed before the next start."""
        if self._file is not None:
            self.folder.mark_requests(has_requests)

    def maintain(self, now: float) -> None:
        """Called at least about once a second: syncs, rewrites, and ends a suspension."""
        if self._file is None:
            if now >= self._retry_at:
                self._rewrite(now, wait=True)
            return
        self._finish(now, wait=False)
        if self._syncing is not None or self.suspended:
            return
        is_dead = self._dead_since is not None and now >= self._dead_since + _ERASE_SECONDS
        if is_dead or self._file.size > max(_SMALL_BYTES, _GROWTH * self._base_bytes):
            self._rewrite(now, wait=False)
        elif self.sync is Sync.SECOND and self._dirty and now >= self._synced_at + _SYNC_SECONDS:
            self._dirty, self._synced_at = False, now
            self._syncing = _Syncing(self._file.descriptor, data_only=True)

    def close(self, now: float) -> None:
        """Leaves a file with only live content, and closes it. On a full disk it leaves the one that is there."""
        if self._file is not None:
            self._finish(now, wait=True)
        if self._file is not None:
            self._is_closing = True
            self._rewrite(now, wait=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, now: float, *, wait: bool) -> None:
        """Writes the next file and begins to sync it."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.aside)
            self._next = _File(os.open(self.folder.aside, _FLAGS, 0o600), self.write)
            payloads = list(self.snapshot())
            self._next.append(FORMAT.first_line + b"".join(map(frame, payloads)))
        except OSError as error:
            self._suspend(f"cannot be written: {error.strerror}", now)
            return
        if self._next.size > self.max_bytes:
            size = self._next.size
            self._suspend(f"would need {size:,} bytes for live requests; the limit is {self.max_bytes:,}", now)
            return
        self._dead_since = None
        self._base_bytes = self._next.size
        self._syncing = _Syncing(self._next.descriptor, data_only=False)
        self._finish(now, wait=wait)

    def _finish(self, now: float, *, wait: bool) -> None:
        """Ends a sync that is complete; puts the next file in place if it was the one that was synced."""
        syncing = self._syncing
        if syncing is None or not syncing.is_done(wait=wait):
            return
        self._syncing = None
        try:
            if syncing.error is not None:
                raise syncing.error
            if self._next is None:
                return
            os.rename(self.folder.aside, self.folder.current)
            if self.sync is not Sync.OFF:
                self.folder.sync()
        except OSError as error:
            self._suspend(f"cannot be written: {error.strerror}", now)
            return
        if self._file is not None:
            self._file.close()
        self._file, self._next = self._next, None
        if self.suspended:
            log.warning("the journal %s is written again", self.folder.path)
            self.suspended = ""

    def _suspend(self, why: str, now: float) -> None:
        if self._syncing is not None:
            self._syncing.is_done(wait=True)
            self._syncing = None
        if self._is_closing and self._file is not None:
            # It is complete: only its next version could not be made.
            self._close_next()
            log.error("the journal %s %s; it stays with what it has of ended requests", self.folder.path, why)
            return
        # Removing the current file, or that of an earlier scheduler, may have freed the space for its next version.
        frees = self._file is not None or os.path.lexists(self.folder.current)
        self._retry_at = now if frees else now + _RETRY_SECONDS
        left = self._remove()
        self._close_next()
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self.suspended:
            log.error(
                "the journal %s %s; it was removed%s, and it is tried again every %g s; streams continue, but would "
                "not survive the death of this process",
                *(self.folder.path, why, left, _RETRY_SECONDS),
            )
        self.suspended = f"the journal {self.folder.path} {why}; streams would not survive the scheduler's death"

    def _close_next(self) -> None:
        if self._next is not None:
            self._next.close()
            self._next = None
            with contextlib.suppress(OSError):
                os.unlink(self.folder.aside)

    def _remove(self) -> str:
        """Removes both files. Returns a clause for the log if an old journal is still there."""
        left = ""
        self.folder.mark_requests(False)
        for path in (self.folder.current, self.folder.aside):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                left = f" (not {path}: {error.strerror}; remove it before the next start)"
        return left


class _Syncing(threading.Thread):
    """One sync of a file in a thread, because a disk may need long and steps must not wait.

    Without a thread to be had it is done at once.
    """

    def __init__(self, descriptor: int, *, data_only: bool) -> None:
        super().__init__(name="journal-sync", daemon=True)
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._data_only = data_only
        try:
            started(self)
        except OSError:
            # Steps wait, but no stream ends.
            self.run()

    def run(self) -> None:
        try:
            (os.fdatasync if self._data_only else os.fsync)(self._descriptor)
        except OSError as error:
            self.error = error

    def is_done(self, *, wait: bool) -> bool:
        """Whether the sync has ended; waits for it if `wait`."""
        if wait and self.is_alive():
            self.join()
        return not self.is_alive()
