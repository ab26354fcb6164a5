"""Handshakes with a service, to find out what it speaks, and for which names its certificate is.

Owns how a certificate is trusted: as gRPC does, a certificate in the file of authorities is trusted by itself. Sends no
call.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path
from socket import create_connection, socket
from typing import TYPE_CHECKING, Any

from tandem_client.address import dialled
from tandem_contract.certificates import own_certificate

if TYPE_CHECKING:
    from tandem_client.connection import TlsSettings

_SECONDS = 5.0
# How a client of HTTP/2 begins: a fixed text and an empty SETTINGS frame. The server's answer begins with such a frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_KIND_AT, _SETTINGS = 3, 4
# Of the alternative names in a certificate.
_KINDS = ("DNS", "IP Address")


class NoGrpc(OSError):
    """The service speaks HTTPS, and not the HTTP/2 of gRPC."""


class ClientUnwanted(OSError):
    """The service shows a good certificate, and does not accept the client's, or its lack of one."""


def context_of(tls: "TlsSettings") -> ssl.SSLContext:
    """The context of a client with these settings. Raises OSError (SSLError too) for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    if tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password="")
    return context


def nameless(context: ssl.SSLContext, *, verifies: bool = True) -> ssl.SSLContext:
    """The context, without a look at the names in a certificate; without `verifies` at nothing of it."""
    context.check_hostname = False
    if not verifies:
        context.verify_mode = ssl.CERT_NONE
    return context


def shake(address: str, context: ssl.SSLContext, name: str | None = None) -> Mapping[str, Any]:
    """Makes a handshake with `host:port` and returns the certificate that the service has shown.

    Raises OSError, of which SSLError is one; NoGrpc; ClientUnwanted if the service ends the connection because of the
    client.
    """
    with (
        _connect(address) as plain,
        context.wrap_socket(plain, server_hostname=name or address.rpartition(":")[0].strip("[]")) as wrapped,
    ):
        if wrapped.selected_alpn_protocol() != "h2":
            raise NoGrpc("it does not take HTTP/2")
        found = wrapped.getpeercert() or {}
        try:
            # In TLS 1.3 a service refuses a client after the client's part of the handshake. HTTP/2 begins at once.
            begins = bool(wrapped.recv(1))
        except (ssl.SSLError, ConnectionResetError):
            begins = False
    if not begins:
        raise ClientUnwanted("the service ended the connection after the handshake")
    return found


def is_plaintext(address: str) -> bool:
    """Whether `host:port` speaks HTTP/2 without TLS. Raises NoGrpc if it speaks HTTP/1."""
    try:
        with _connect(address) as plain:
            plain.sendall(_PREFACE)
            answer = plain.recv(9)
    except OSError:
        return False
    if answer.startswith(b"HTTP/1"):
        raise NoGrpc("it takes HTTP/1.1")
    return len(answer) > _KIND_AT and answer[_KIND_AT] == _SETTINGS


def _connect(address: str) -> socket:
    host, _, port = dialled(address).rpartition(":")
    return create_connection((host.strip("[]"), int(port)), _SECONDS)


def names_in(certificate: Mapping[str, Any]) -> list[str]:
    """The names and addresses that a certificate, as the ssl module gives it, is for."""
    found = [str(value).strip() for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    if found:
        return found
    return [str(value) for pairs in certificate.get("subject", ()) for kind, value in pairs if kind == "commonName"]


def own_names(certificate: Path, key: Path) -> list[str]:
    """The names in a server's certificate; empty if the files cannot be used."""
    return names_in(own_certificate(certificate, key))
