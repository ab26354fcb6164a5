"""Owns the server's TLS credentials, which follow changes of the certificate files without a restart.

gRPC asks for the certificates at each handshake, in a thread of its own. The files are looked at once a second at most.
Files that cannot be used are reported once, and the last good ones stay in force.
"""

import logging
import threading
import time
from typing import Any, cast

import grpc

from scheduler_svc.door.tls_files import TlsContent, TlsFileError, TlsFiles

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

_State = tuple[tuple[int, int, int], ...] | None


class Certificates:
    """The newest good content of the files."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises TlsFileError."""
        self._files = files
        self._state = self._look()
        self._first = _configuration(files.read())
        self._lock = threading.Lock()
        self._look_at = time.monotonic() + LOOK_SECONDS

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials of a server."""
        make = cast(Any, grpc).dynamic_ssl_server_credentials
        return make(self._first, self._changed, require_client_authentication=self._files.client_ca is not None)

    def _changed(self) -> Any:
        """Returns the configuration for this handshake and the next ones; None if it is as before."""
        now = time.monotonic()
        with self._lock:
            if now < self._look_at:
                return None
            self._look_at = now + LOOK_SECONDS
            if (state := self._look()) == self._state:
                return None
            self._state = state
        try:
            content = self._files.read()
        except TlsFileError as error:
            logger.error("%s; the certificate read before stays in force", error)
            return None
        logger.info("the certificate %s was read again", self._files.certificate)
        return _configuration(content)

    def _look(self) -> _State:
        try:
            return self._files.state()
        except OSError:
            return None


def _configuration(content: TlsContent) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(content.key, content.certificate)], root_certificates=content.client_ca
    )
