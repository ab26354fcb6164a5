"""Why no call can reach the service: what the gateway's flags say of TLS, and what the service does."""

import ssl

from tandem_client.connection import TlsSettings
from tandem_client.services.handshake import ClientUnwanted, context_of, is_plaintext, nameless, names_in, shake

# OpenSSL's codes of a certificate that is not valid yet or no more, and of one for another host or address.
_OUT_OF_TIME, _OTHER_NAME = (9, 10), (62, 64)


def fault(address: str, tls: TlsSettings | None) -> str | None:
    """Returns what is wrong, with the flag that mends it; None if nothing listens, or a handshake shows no fault.

    Blocks for some seconds at most.
    """
    if tls is None:
        return _fault_of_plaintext(address)
    context = context_of(tls)
    try:
        shake(address, context, tls.server_name)
    except ssl.SSLCertVerificationError as error:
        return _fault_of_certificate(address, tls, context, error)
    except ClientUnwanted:
        if tls.cert is None:
            return f"the service at {address} wants a certificate of its clients; give --service-cert and --service-key"
        return f"the service at {address} does not accept the certificate of --service-cert ({tls.cert})"
    except OSError:
        if is_plaintext(address):
            return (
                f"the service at {address} speaks plaintext; leave out --service-ca and --service-tls, or start the"
                " service with --tls-cert and --tls-key"
            )
    return None


def _fault_of_plaintext(address: str) -> str | None:
    if is_plaintext(address):
        return None
    try:
        shake(address, nameless(context_of(TlsSettings()), verifies=False))
    except ClientUnwanted:
        pass
    except OSError:
        return None
    return f"the service at {address} speaks TLS; give --service-ca, its certificate or that of its authority"


def _fault_of_certificate(
    address: str, tls: TlsSettings, context: ssl.SSLContext, error: ssl.SSLCertVerificationError
) -> str:
    its = f"the certificate of the service at {address}"
    if error.verify_code in _OUT_OF_TIME:
        return f"{its} has expired or is not valid yet: {error.verify_message}"
    if error.verify_code in _OTHER_NAME:
        wanted = tls.server_name or address.rpartition(":")[0]
        try:
            names = names_in(shake(address, nameless(context)))
        except OSError:
            names = []
        known = f"for {', '.join(names)} and " if names else ""
        return f"{its} is {known}not for {wanted}; give --service-name, one of the certificate's names"
    whose = f"from {tls.ca} (--service-ca)" if tls.ca is not None else "of a known authority; give --service-ca"
    return f"{its} is not {whose}: {error.verify_message}"
