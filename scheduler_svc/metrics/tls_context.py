"""Makes the page's TLS context, which follows changes of the certificate files without a restart."""

import ssl

from scheduler_svc.door.tls_files import TlsContent, TlsFileError, TlsFiles


def context_of(files: TlsFiles, content: TlsContent) -> ssl.SSLContext:
    """Returns a new context. Raises TlsFileError."""
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
