"""Owns the server's TLS credentials, which follow changes of the certificate files without a restart.

gRPC asks for the certificates at each handshake, in a thread of its own.
"""

from typing import Any, cast

import grpc

from scheduler_svc.door.tls_files import FollowedFiles, TlsContent, TlsFiles


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """The credentials of a server. Raises TlsFileError."""
    followed = FollowedFiles(files, _configuration)
    make = cast(Any, grpc).dynamic_ssl_server_credentials
    return make(
        followed.value,
        # The configuration for this handshake and the next ones; None if it is as before.
        lambda: followed.value if followed.renew() else None,
        require_client_authentication=files.client_ca is not None,
    )


def _configuration(content: TlsContent) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(content.key, content.certificate)], root_certificates=content.client_ca
    )
