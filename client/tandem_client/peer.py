"""What is wrong between a client and what listens at its address, found out by handshakes of its own.

gRPC says "Socket closed" of a service with TLS that is called without, and of one that misses the client's certificate.
Owns the cases and their words, each caller has its own names of the settings; and how a certificate is trusted: as gRPC
does, a certificate in the file of authorities is trusted by itself. No request and no token is sent. Imports no gRPC.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection, socket
from typing import TYPE_CHECKING, Any

from tandem_client.address import dialled
from tandem_client.errors import NO_GRPC, OtherProtocol, TandemError
from tandem_contract.certificates import own_certificate, shortest

if TYPE_CHECKING:
    from tandem_client.connection import Access, TlsSettings

_SECONDS = 5.0
# How a client of HTTP/2 begins: a fixed text and an empty SETTINGS frame. The server's answer begins with such a frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_KIND_AT, _SETTINGS = 3, 4
# The kinds of alternative names in a certificate.
_KINDS = ("DNS", "IP Address")
# OpenSSL's numbers: not yet valid, expired; another host's name, another address.
_OUT_OF_TIME, _OTHER_NAME = (9, 10), (62, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the settings of a connection are called, and what is to be done to have TLS, or none. The library's own."""

    tls: str = "give tls=TlsSettings()"
    no_tls: str = "leave tls out"
    ca: str = "tls.ca"
    server_name: str = "tls.server_name"
    cert: str = "tls.cert"
    key: str = "tls.key"


def explained(error: TandemError, access: "Access") -> TandemError:
    """Returns the error with the cause of a handshake that failed, if one is found; any other error as it is.

    Blocks for some seconds at most.
    """
    if not isinstance(error, OtherProtocol) or not access.is_direct:
        return error
    said = fault(access.address, access.tls, Names())
    return OtherProtocol(said, code=error.code) if said else error


def fault(address: str, tls: "TlsSettings | None", names: Names) -> str | None:
    """Returns what is wrong, with what mends it; None if nothing listens, or a handshake shows no fault.

    Blocks for some seconds at most.
    """
    try:
        return _fault_of_plaintext(address, names) if tls is None else _fault_of_tls(address, tls, names)
    except NoGrpc:
        return f"{address} {NO_GRPC}"
    except OSError:
        # A file of the settings, which is read again here.
        return None


def _fault_of_plaintext(address: str, names: Names) -> str | None:
    if is_plaintext(address):
        return None
    context = context_of(None)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        shake(address, context)
    except ClientUnwanted:
        pass
    except OSError:
        return None
    return f"the service at {address} speaks TLS; {names.tls}"


def _fault_of_tls(address: str, tls: "TlsSettings", names: Names) -> str | None:
    context = context_of(tls)
    try:
        shake(address, context, tls.server_name)
    except ssl.SSLCertVerificationError as error:
        return _fault_of_certificate(address, tls, names, context, error)
    except ClientUnwanted:
        if tls.cert is None:
            wanted = f"give {names.cert} and {names.key}"
            return f"the service at {address} wants a certificate of its clients; {wanted}"
        return f"the service at {address} does not accept the certificate of {names.cert} ({os.fspath(tls.cert)})"
    except OSError:
        if is_plaintext(address):
            return f"the service at {address} speaks plaintext; {names.no_tls}"
    return None


def _fault_of_certificate(
    address: str, tls: "TlsSettings", names: Names, context: ssl.SSLContext, error: ssl.SSLCertVerificationError
) -> str:
    its = f"the certificate of the service at {address}"
    if error.verify_code in _OUT_OF_TIME:
        return f"{its} has expired or is not valid yet: {error.verify_message}"
    if error.verify_code in _OTHER_NAME:
        wanted = tls.server_name or address.rpartition(":")[0]
        context.check_hostname = False
        try:
            names_there = names_in(shake(address, context))
        except (OSError, NoGrpc):
            names_there = []
        others = f"for {', '.join(names_there)} and " if names_there else ""
        return f"{its} is {others}not for {wanted}; give {names.server_name}, one of the certificate's names"
    whose = f"from {tls.ca} ({names.ca})" if tls.ca is not None else f"of a known authority; give {names.ca}"
    return f"{its} is not {whose}: {error.verify_message}"


class NoGrpc(Exception):
    """The service speaks HTTPS, and not the HTTP/2 of gRPC."""


class ClientUnwanted(OSError):
    """The service shows a good certificate, and does not accept the client's, or its lack of one."""


def context_of(tls: "TlsSettings | None") -> ssl.SSLContext:
    """The context of a client with these settings; None: the default ones.

    Raises OSError (SSLError too) for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    if tls is None or tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(tls.ca)
    if tls is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password="")
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
        shown = wrapped.getpeercert() or {}
        try:
            # In TLS 1.3 a service refuses a client after the client's part of the handshake. HTTP/2 begins at once.
            begins = bool(wrapped.recv(1))
        except (ssl.SSLError, ConnectionResetError):
            begins = False
    if not begins:
        raise ClientUnwanted("the service ended the connection after the handshake")
    return shown


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
    names = [shortest(str(value)) for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    return names or [
        str(value) for pairs in certificate.get("subject", ()) for kind, value in pairs if kind == "commonName"
    ]


def own_names(certificate: Path, key: Path) -> list[str]:
    """The names in a server's certificate; empty if the files cannot be used."""
    return names_in(own_certificate(certificate, key))
