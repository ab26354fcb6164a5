"""Requests without TLS: a context that reads this machine's authorities takes longer to make than a request."""

import socket
import ssl
from functools import partial

import httpx2 as httpx

_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_AUTHORITIES)
head = partial(httpx.head, verify=_NO_AUTHORITIES)
post = partial(httpx.post, verify=_NO_AUTHORITIES)
stream = partial(httpx.stream, verify=_NO_AUTHORITIES)


def connected(url: str) -> socket.socket:
    """A connection to the server of a URL."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def everything(sock: socket.socket) -> bytes:
    """All that comes until the other side closes the connection."""
    found = b""
    while piece := sock.recv(65536):
        found += piece
    return found
