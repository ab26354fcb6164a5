"""Owns the page's TLS context, which follows changes of the certificate files without a restart.

The files are looked at once a second at most, when a connection comes.
"""

import logging
import ssl

from scheduler_svc.door.tls_files import TlsFileError, TlsFiles
from tandem_contract.certificates import Followed

log = logging.getLogger("tandem.core")

_LOOK_SECONDS = 1.0


class TlsContext:
    """The context of the next connection."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises TlsFileError."""
        self._files = files
        self._followed = Followed(files.paths, self._read, log, pause_seconds=_LOOK_SECONDS)
        self._read()

    def current(self) -> ssl.SSLContext:
        """Returns the newest context whose files could be used."""
        self._followed.look()
        return self._context

    def _read(self) -> None:
        self._context = _context(self._files)


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
