"""Watches the token file and reads it again when it has changed. Owns the last good table.

A file that becomes wrong or unreadable changes nothing but the log, so a typing error locks nobody out.
"""

import logging
import threading
from pathlib import Path

from scheduler_svc.door.table import Table
from scheduler_svc.door.tenant import Tenant
from scheduler_svc.door.token_file import TokenFileError, read

log = logging.getLogger("tandem.core")

# What tells that a file has changed: inode, size, time, mode. None: the file cannot be found.
_State = tuple[int, int, int, int] | None


class TokenFile:
    """The token file and its last good content."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises TokenFileError."""
        self._path = path
        self._state = _state_of(path)
        self.tenants: tuple[Tenant, ...] = read(path)
        self.table = Table(self.tenants)
        self._reader: threading.Thread | None = None
        self._read: tuple[Tenant, ...] | None = None

    def poll(self) -> bool:
        """Looks at the file; returns whether its content was replaced. Call it about once a second.

        A thread reads the file, because a large one takes seconds, and a later call takes what it has read.
        """
        if self._reader is not None:
            if self._reader.is_alive():
                return False
            self._reader = None
            if self._read is not None:
                self._take(self._read)
                self._read = None
                return True
        if (state := _state_of(self._path)) != self._state:
            self._state = state
            self._reader = threading.Thread(target=self._read_again, daemon=True)
            self._reader.start()
        return False

    def _read_again(self) -> None:
        try:
            self._read = read(self._path)
        except TokenFileError as error:
            log.error("tokens: %s; the tokens read before stay in force", error)

    def _take(self, tenants: tuple[Tenant, ...]) -> None:
        self.tenants, self.table = tenants, Table(tenants)
        log.info("%s was read: %s", self._path, summary(tenants))


def summary(tenants: tuple[Tenant, ...]) -> str:
    """Returns how many tenants, tokens and certificates there are."""
    num_tokens = sum(len(tenant.tokens) for tenant in tenants)
    num_certificates = sum(len(tenant.certificates) for tenant in tenants)
    return f"{len(tenants):,} tenants, {num_tokens:,} tokens, {num_certificates:,} certificates"


def _state_of(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
