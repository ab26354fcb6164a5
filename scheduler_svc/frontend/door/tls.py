"""Owns the server's TLS credentials, which follow changes of the certificate files without a restart.

gRPC asks for the certificates at each handshake, in a thread of its own. The files are looked at once a second at most.
"""

import logging
import threading
from typing import Any, cast

import grpc

from scheduler_svc.door.tls_files import TlsContent, TlsFiles
from tandem_contract.certificates import Followed

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class Certificates:
    """The newest good content of the files."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises TlsFileError."""
        self._files = files
        self._followed = Followed(files.paths, self._read, logger, pause_seconds=LOOK_SECONDS)
        # What gRPC does not have yet.
        self._news: Any = None
        self._read()
        self._lock = threading.Lock()

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials of a server."""
        make = cast(Any, grpc).dynamic_ssl_server_credentials
        wants_client = self._files.client_ca is not None
        return make(self._changed(), self._changed, require_client_authentication=wants_client)

    def _changed(self) -> Any:
        """Returns the configuration for this handshake and the next ones; None if it is as before."""
        if not self._lock.acquire(blocking=False):
            # Another handshake looks.
            return None
        try:
            self._followed.look()
            news, self._news = self._news, None
            return news
        finally:
            self._lock.release()

    def _read(self) -> None:
        self._news = _configuration(self._files.read())


def _configuration(content: TlsContent) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(content.key, content.certificate)], root_certificates=content.client_ca
    )
