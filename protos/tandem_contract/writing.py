"""Files that a service writes beside its work: what cannot be written is said, and stops nothing.

A full disk, a quota, a failing disk, one that became read-only and a limit of file sizes all raise OSError, and each
may end by itself. So one rule holds for all: the first failure is logged with its path, further ones are only counted,
and when it works again that is logged with the number of records that were lost. What was written before stays whole:
a record of which only a part was written is cut off before the next one.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from tandem_contract import private_file


class Trouble:
    """What is said of one place that may fail. Begins again whenever it works."""

    def __init__(self, log: logging.Logger, what: str, path: Path, consequence: str) -> None:
        """`what` names the file or folder, `consequence` says what the failure means to the service."""
        self._log = log
        self._what, self._path, self._consequence = what, path, consequence
        # Records that were lost since it worked last, and the present cause.
        self.num_lost = 0
        self.cause = ""

    def failed(self, error: OSError, count: int = 1) -> None:
        """Notes the number of lost records; logs the first failure."""
        self.num_lost += count
        if not self.cause:
            self.cause = error.strerror or str(error)
            self._log.error("%s %s cannot be written: %s; %s", self._what, self._path, self.cause, self._consequence)

    def worked(self) -> None:
        """Notes that it works; logs this if it failed before."""
        if self.cause:
            self._log.warning(
                "%s %s is written again; records lost meanwhile: %s", self._what, self._path, f"{self.num_lost:,}"
            )
            self.cause, self.num_lost = "", 0


class RecordFile:
    """A new file, only for this user, to which whole records are appended. After its creation it raises no OSError."""

    def __init__(
        self,
        path: Path,
        *,
        log: logging.Logger,
        what: str,
        consequence: str,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """Raises FileExistsError, OSError. `write` is os.write, or a test's."""
        # Unbuffered: a buffer that could not be written would be written later, in the middle of others.
        self._file = private_file.create(path, buffering=0)
        self._write = write
        self._size = 0
        self._is_torn = False
        self.path = path
        self.trouble = Trouble(log, what, path, consequence)

    def append(self, data: bytes, count: int = 1) -> bool:
        """Writes `count` whole records, all or none of them; returns whether they were written."""
        left = data
        try:
            if self._is_torn:
                self._cut()
            while left:
                left = left[self._write(self._file.fileno(), left) :]
        except OSError as error:
            if len(left) < len(data):
                self._is_torn = True
                with contextlib.suppress(OSError):
                    self._cut()
            self.trouble.failed(error, count)
            return False
        self._size += len(data)
        self.trouble.worked()
        return True

    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return not os.fstat(self._file.fileno()).st_nlink

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _cut(self) -> None:
        """Removes a part of a record. Raises OSError."""
        os.ftruncate(self._file.fileno(), self._size)
        os.lseek(self._file.fileno(), self._size, os.SEEK_SET)
        self._is_torn = False
