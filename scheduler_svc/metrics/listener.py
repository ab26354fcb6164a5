"""Owns the address of the page and the parts behind it: sockets, the right to read, TLS, server and text.

Any caller may read the page without a token file, otherwise callers with the right `metrics`, by the rules of gRPC
callers (`frontend/entrance.py`): a bearer token, or a client's certificate if there is no token. All failed proofs have
the same answer. No token is logged.
"""

import os
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from scheduler_svc.door.tenant import Right
from scheduler_svc.door.tls_files import FollowedFiles, TlsContent, TlsFileError, TlsFiles
from scheduler_svc.door.token_file import TokenFile
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.processes import address


def _context(content: TlsContent) -> ssl.SSLContext:
    content.context.minimum_version = ssl.TLSVersion.TLSv1_2
    if content.client_ca is not None:
        content.context.verify_mode = ssl.CERT_REQUIRED
    return content.context


def refusal(
    tokens: TokenFile | None, authorizations: Sequence[bytes], certificate: dict[str, Any] | None
) -> HTTPStatus | None:
    """Returns UNAUTHORIZED or FORBIDDEN, or None if the caller may read the page.

    `authorizations` are the values of the request's Authorization headers, `certificate` is the client's as the ssl
    module returns it, verified.
    """
    if tokens is None:
        return None
    caller = tokens.table.of_call(authorizations, _names(certificate or {}), time.time())
    if caller is None:
        return HTTPStatus.UNAUTHORIZED
    return None if Right.METRICS in caller.rights else HTTPStatus.FORBIDDEN


def _names(certificate: dict[str, Any]) -> Iterable[str]:
    """Yields the alternative names, then the common name."""
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI"):
            yield name
    for pairs in certificate.get("subject", ()):
        yield from (value for name, value in pairs if name == "commonName")


FLAG = "--metrics-listen"
_BACKLOG = 128


class MetricsListener:
    """The page at one address. `meter` has its numbers."""

    def __init__(self, listen: str, *, tokens: TokenFile | None, tls: TlsFiles | None) -> None:
        """Binds the address; nothing is served before `start`. Raises address.ListenError."""
        # Their libraries take a tenth of a second, which a service without the page does not spend.
        from scheduler_svc.metrics.http_server import HttpServer
        from scheduler_svc.metrics.page import CONTENT_TYPE, Page

        missing = address.missing_flags(has_tls=tls is not None, has_tokens=tokens is not None)
        host, port = address.split(listen, missing=missing, flag=FLAG)
        self.meter = CoreMeter()
        try:
            context = None if tls is None else FollowedFiles(tls, _context, whose="metrics: ")
        except TlsFileError as error:
            raise address.ListenError(str(error), flag=FLAG) from None
        try:
            sockets = _bind(host, port)
        except OSError as error:
            raise address.taken(listen, error, flag=FLAG) from None
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{host}:{sockets[0].getsockname()[1]}/metrics"
        server = HttpServer(
            sockets,
            Page(self.meter, lambda: () if tokens is None else {tenant.name for tenant in tokens.tenants}).text,
            content_type=CONTENT_TYPE,
            refuse=partial(refusal, tokens),
            context=None if context is None else context.newest,
        )
        # They serve the page, in a thread, and end it and free the address.
        self.start, self.close = server.start, server.stop


def _bind(host: str, port: int) -> list[socket.socket]:
    """Listens at every address of the host, at one port. Raises OSError if none can be bound."""
    bound: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, where in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        at = where[0], port or (bound[0].getsockname()[1] if bound else 0)
        try:
            bound.append(socket.create_server(at, family=family, backlog=_BACKLOG))
        except OSError as error:
            # Without the address, which `create_server` appends to the words.
            failure = failure or OSError(error.errno, os.strerror(error.errno or 0))
    if not bound:
        raise failure or OSError("no address can be bound")
    return bound
