"""Owns the address of the page and the parts behind it: sockets, who may read, TLS, server and text."""

import socket
from collections.abc import Collection

from scheduler_svc.door.tls_files import TlsFileError, TlsFiles
from scheduler_svc.door.watch import TokenFile
from scheduler_svc.metrics.access import refusal
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.metrics.tls_context import TlsContext
from scheduler_svc.processes import address

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
        host, port = address.split(listen, missing=missing)
        self.meter = CoreMeter()
        try:
            context = None if tls is None else TlsContext(tls)
        except TlsFileError as error:
            raise address.ListenError(str(error)) from None
        self._tokens = tokens
        try:
            sockets = _bind(host, port)
        except OSError as error:
            raise address.taken(listen, error, flag=FLAG) from None
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{host}:{sockets[0].getsockname()[1]}/metrics"
        self._server = HttpServer(
            sockets,
            Page(self.meter, self._tenants).text,
            content_type=CONTENT_TYPE,
            refuse=lambda authorizations, certificate: refusal(tokens, authorizations, certificate),
            context=None if context is None else context.current,
        )

    def start(self) -> None:
        """Serves the page, in a thread."""
        self._server.start()

    def close(self) -> None:
        """Ends the page and frees the address."""
        self._server.stop()

    def _tenants(self) -> Collection[str]:
        return () if self._tokens is None else {tenant.name for tenant in self._tokens.tenants}


def _bind(host: str, port: int) -> list[socket.socket]:
    """Listens at every address of the host, at one port. Raises OSError if none can be bound."""
    bound: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, where in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        one = socket.socket(family)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((where[0], port or (bound[0].getsockname()[1] if bound else 0)))
            one.listen(_BACKLOG)
        except OSError as error:
            one.close()
            failure = failure or error
        else:
            bound.append(one)
    if not bound:
        raise failure or OSError("no address can be bound")
    return bound
