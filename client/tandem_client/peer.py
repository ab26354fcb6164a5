"""What listens at an address where a handshake failed: found out by one connection of its own, after the failure.

gRPC says "Socket closed" of a service with TLS that is called without, and of one that misses the client's certificate.
Owns that connection, which sends no request and no token, and the words of each case. Not for a proxy's connections.
"""

import contextlib
import os
import socket
import ssl
from typing import Any

from tandem_client.address import dialled
from tandem_client.connection import Access, TlsSettings
from tandem_client.errors import OtherProtocol, TandemError
from tandem_client.wire.rpc_errors import NO_GRPC

_SECONDS = 2.0
# How long a server has to refuse the client's certificate: with TLS 1.3 it does so after the handshake.
_REFUSAL_SECONDS = 1.0
# What a client of HTTP/2 sends first: the preface, and SETTINGS without any.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


def explained(error: TandemError, access: Access) -> TandemError:
    """Returns the error with the cause of a handshake that failed, if one is found; any other error as it is.

    Connects once, and waits for at most some seconds.
    """
    if not isinstance(error, OtherProtocol) or not access.is_direct:
        return error
    host, _, port = dialled(access.address).rpartition(":")
    where = host.removeprefix("[").removesuffix("]"), int(port)
    try:
        said = _without_tls(where) if access.tls is None else _with_tls(where, access.tls)
    except OSError:
        said = ""
    return OtherProtocol(f"{access.address} {said}", code=error.code) if said else error


def _without_tls(where: tuple[str, int]) -> str:
    if said := _in_plaintext(where):
        return NO_GRPC if said == "http" else ""
    context = _context()
    with contextlib.suppress(ssl.SSLError, OSError), _connected(where) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=where[0]) as wrapped:
                if wrapped.selected_alpn_protocol() != "h2":
                    return NO_GRPC.replace("HTTP/1.1", "HTTPS")
        except ssl.SSLError as error:
            if "ALERT" not in (error.reason or ""):
                return ""
        return "takes connections with TLS only; give tls=TlsSettings()"
    return ""


def _with_tls(where: tuple[str, int], tls: TlsSettings) -> str:
    name = tls.server_name or where[0]
    try:
        context = _context(tls)
        with _connected(where) as raw, context.wrap_socket(raw, server_hostname=name) as wrapped:
            if wrapped.selected_alpn_protocol() != "h2":
                return NO_GRPC.replace("HTTP/1.1", "HTTPS")
            if not _has_name(wrapped.getpeercert() or {}, name):
                names = ", ".join(_names(wrapped.getpeercert() or {})) or "no name"
                return f"has a certificate for {names}, and not for {name}; set tls.server_name to a name in it"
            wrapped.settimeout(_REFUSAL_SECONDS)
            with contextlib.suppress(TimeoutError, ConnectionError):
                # gRPC ends such a connection without a word; else SETTINGS come.
                return "" if wrapped.recv(1) else _of_client(tls)
            return ""
    except ssl.SSLCertVerificationError as error:
        by = f"no authority in tls.ca ({os.fspath(tls.ca)})" if tls.ca is not None else "no public authority"
        if error.verify_code in _EXPIRED:
            return f"has a certificate that cannot be used: {error.verify_message}"
        return f"has a certificate that {by} has signed ({error.verify_message}); set tls.ca to the file of its own"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason or isinstance(error, ssl.SSLEOFError):
            return _of_client(tls)
    except (ConnectionError, EOFError):
        pass
    said = _in_plaintext(where)
    if said == "http":
        return NO_GRPC
    return "speaks gRPC without TLS; leave tls out" if said else ""


def _of_client(tls: TlsSettings) -> str:
    """The words for a server that ends the connection when it has seen what the client shows."""
    if tls.cert is None:
        return "takes callers with a certificate only; set tls.cert and tls.key"
    return f"refuses the certificate of tls.cert ({os.fspath(tls.cert)})"


# Not yet valid, expired: X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED.
_EXPIRED = (9, 10)


def _in_plaintext(where: tuple[str, int]) -> str:
    """Returns "grpc" or "http" for what answers a client of HTTP/2 without TLS; empty if it is neither."""
    with _connected(where) as plain:
        plain.sendall(_PREFACE)
        try:
            first = plain.recv(64)
        except OSError:
            return ""
    if first.startswith(b"HTTP/1"):
        return "http"
    # A frame of HTTP/2: three bytes of length, then its type.
    return "grpc" if len(first) > 3 and first[3] == _SETTINGS else ""


def _connected(where: tuple[str, int]) -> socket.socket:
    return socket.create_connection(where, timeout=_SECONDS)


def _context(tls: TlsSettings | None = None) -> ssl.SSLContext:
    """A context that checks the authority, if there are settings, and never the name, which is compared afterwards."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.check_hostname = False
    if tls is None:
        context.verify_mode = ssl.CERT_NONE
        return context
    if tls.ca is None:
        context.load_default_certs()
    else:
        # As gRPC does, which takes any certificate of the file for an authority.
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(tls.ca)
    if tls.cert is not None:
        # A key with a passphrase would make OpenSSL ask the terminal.
        context.load_cert_chain(tls.cert, tls.key, password="")
    return context


def _names(certificate: dict[str, Any]) -> list[str]:
    """The names in a certificate as the ssl module gives it."""
    return [name for _, name in certificate.get("subjectAltName", ())]


def _has_name(certificate: dict[str, Any], name: str) -> bool:
    """Whether the name, or one with a wildcard for its first part, is in the certificate."""
    wildcard = f"*.{name.partition('.')[2]}"
    return any(known.lower() in (name.lower(), wildcard.lower()) for known in _names(certificate))
