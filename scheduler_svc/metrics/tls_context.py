"""Owns the page's TLS context, which follows changes of the certificate files without a restart.

The files are looked at once a second at most, when a connection comes. Files that cannot be used are reported once, and
the last good ones stay in force.
"""

import logging
import ssl
import time

from scheduler_svc.door.tls_files import TlsFileError, TlsFiles

log = logging.getLogger("tandem.core")

_LOOK_SECONDS = 1.0


class TlsContext:
    """The context of the next connection."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises TlsFileError."""
        self._files = files
        self._state = self._look()
        self._context = _context(files)
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def current(self) -> ssl.SSLContext:
        """Returns the newest context whose files could be used."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            if (state := self._look()) != self._state:
                self._state = state
                self._replace()
        return self._context

    def _replace(self) -> None:
        try:
            self._context = _context(self._files)
        except TlsFileError as error:
            log.error("metrics: %s; the certificate read before stays in force", error)
        else:
            log.info("metrics: the certificate %s was read again", self._files.certificate)

    def _look(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            return self._files.state()
        except OSError:
            return None


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Returns a new context. Raises TlsFileError."""
    content = files.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, OSError, ValueError):
        raise TlsFileError(f"--tls-key: {files.key} was replaced while it was read") from None
    if content.client_ca is not None:
        context.load_verify_locations(cadata=content.client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
