"""What is wrong between a client and what listens at its address, found out by handshakes of its own.

gRPC says "Socket closed" of a service with TLS that is called without, and of one that misses the client's certificate.
Owns the cases and their words; each caller has its own names of the settings. No request and no token is sent.
"""

import os
import ssl
from dataclasses import dataclass

from tandem_client.connection import Access, TlsSettings
from tandem_client.errors import OtherProtocol, TandemError
from tandem_client.handshake import ClientUnwanted, NoGrpc, context_of, is_plaintext, nameless, names_in, shake
from tandem_client.wire.rpc_errors import NO_GRPC

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


KEYWORDS = Names()


def explained(error: TandemError, access: Access) -> TandemError:
    """Returns the error with the cause of a handshake that failed, if one is found; any other error as it is.

    Blocks for some seconds at most.
    """
    if not isinstance(error, OtherProtocol) or not access.is_direct:
        return error
    said = fault(access.address, access.tls, KEYWORDS)
    return OtherProtocol(said, code=error.code) if said else error


def fault(address: str, tls: TlsSettings | None, names: Names) -> str | None:
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
    try:
        shake(address, nameless(context_of(TlsSettings()), verifies=False))
    except (ClientUnwanted, NoGrpc) as error:
        if isinstance(error, NoGrpc):
            raise
    except OSError:
        return None
    return f"the service at {address} speaks TLS; {names.tls}"


def _fault_of_tls(address: str, tls: TlsSettings, names: Names) -> str | None:
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
    except NoGrpc:
        raise
    except OSError:
        if is_plaintext(address):
            return f"the service at {address} speaks plaintext; {names.no_tls}"
    return None


def _fault_of_certificate(
    address: str, tls: TlsSettings, names: Names, context: ssl.SSLContext, error: ssl.SSLCertVerificationError
) -> str:
    its = f"the certificate of the service at {address}"
    if error.verify_code in _OUT_OF_TIME:
        return f"{its} has expired or is not valid yet: {error.verify_message}"
    if error.verify_code in _OTHER_NAME:
        wanted = tls.server_name or address.rpartition(":")[0]
        try:
            found = names_in(shake(address, nameless(context)))
        except OSError:
            found = []
        known = f"for {', '.join(found)} and " if found else ""
        return f"{its} is {known}not for {wanted}; give {names.server_name}, one of the certificate's names"
    whose = f"from {tls.ca} ({names.ca})" if tls.ca is not None else f"of a known authority; give {names.ca}"
    return f"{its} is not {whose}: {error.verify_message}"
