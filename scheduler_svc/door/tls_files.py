"""The files of TLS: the server's certificate and key, and the authority of client certificates. Knows no gRPC.

Their owners follow changes without a restart. Files that cannot be used change nothing but the log.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger("tandem.tls")

_T = TypeVar("_T")
LOOK_SECONDS = 1.0

# Real chains have some 10 kB.
MAX_FILE_BYTES = 1 << 20


class TlsFileError(Exception):
    """A file cannot be used. The message names the flag and the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContent:
    """The content of the files, PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The paths. With `client_ca`, every client needs a certificate of that authority (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """Returns what changes when a file is replaced: inode, size and time of each. Raises OSError."""
        found = [path.stat() for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def read(self) -> TlsContent:
        """Reads and checks the files. Raises TlsFileError."""
        content = TlsContent(
            certificate=_read("--tls-cert", self.certificate),
            key=_read("--tls-key", self.key),
            client_ca=None if self.client_ca is None else _read("--tls-client-ca", self.client_ca),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An encrypted key would make OpenSSL ask the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            why = f"{self.key} cannot be used with the certificate {self.certificate}: {_reason(error)}"
            raise TlsFileError(f"--tls-key: {why}; both must be PEM, and the key not encrypted") from None
        if content.client_ca is not None:
            try:
                context.load_verify_locations(cadata=content.client_ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                why = f"{self.client_ca} has no certificate of an authority in PEM: {_reason(error)}"
                raise TlsFileError(f"--tls-client-ca: {why}") from None
        return content


class FollowedFiles(Generic[_T]):
    """What `make` makes of the files' content, which may change without a restart."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsContent], _T], *, whose: str = "") -> None:
        """Reads the files. `whose` begins the lines of the log. Raises TlsFileError, and so may `make`."""
        self._files, self._make, self._whose = files, make, whose
        self._state = self._look()
        self.value = make(files.read())
        """Of the newest content that could be used."""
        self._lock = threading.Lock()
        self._look_at = time.monotonic() + LOOK_SECONDS

    def renew(self) -> bool:
        """Looks at the files, once a second at most, from any thread. Returns whether `value` is a new one.

        Files that cannot be used are reported once.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._look_at:
                return False
            self._look_at = now + LOOK_SECONDS
            if (state := self._look()) == self._state:
                return False
            self._state = state
        try:
            self.value = self._make(self._files.read())
        except TlsFileError as error:
            log.error("%s%s; the certificate read before stays in force", self._whose, error)
            return False
        log.info("%sthe certificate %s was read again", self._whose, self._files.certificate)
        return True

    def newest(self) -> _T:
        """Returns `value` after a look at the files."""
        self.renew()
        return self.value

    def _look(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            return self._files.state()
        except OSError:
            return None


def check(certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """Returns the files; None if no flag of TLS is given. Raises TlsFileError if one is missing, or of no use."""
    given = {"--tls-cert": certificate, "--tls-key": key, "--tls-client-ca": client_ca}
    present = [flag for flag, path in given.items() if path is not None]
    missing = [flag for flag in ("--tls-cert", "--tls-key") if given[flag] is None]
    if present and missing:
        raise TlsFileError(f"{present[0]} is set, and {' and '.join(missing)} missing; TLS needs certificate and key")
    if certificate is None or key is None:
        return None
    files = TlsFiles(certificate=certificate, key=key, client_ca=client_ca)
    files.read()
    return files


def _read(flag: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsFileError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TlsFileError(f"{flag}: {path} has more than {MAX_FILE_BYTES:,} bytes, which is the limit")
    return data


def _reason(error: Exception) -> str:
    """The reason without the content of the file."""
    return (error.reason if isinstance(error, ssl.SSLError) else "") or "its content is not valid"
