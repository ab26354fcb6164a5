"""Whether the service answers and asks callers for tokens, and what follows: a public gateway serves only if it does.

The gateway has no token file, so it asks the service, by a call without a token. If no call reaches the service, a
handshake tells which flag of TLS is wrong.
"""

import asyncio
import logging
import ssl
from typing import NoReturn

from tandem_client.connection import TlsSettings
from tandem_client.gateway.errors import unavailable
from tandem_client.gateway.service import Service
from tandem_client.gateway.settings import Settings
from tandem_client.services.handshake import ClientUnwanted, context_of, is_plaintext, nameless, names_in, shake
from tandem_contract.settings import SettingError

# OpenSSL's codes of a certificate that is not valid yet or no more, and of one for another host or address.
_OUT_OF_TIME, _OTHER_NAME = (9, 10), (62, 64)

log = logging.getLogger("tandem.gateway")

# Between two looks, and for one of them.
_LOOK_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 0.5


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


class Guard:
    """What is known about the service's door."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, self._settings = service, settings
        # Why no call reaches the service; None if that has another cause than the flags.
        self._fault: str | None = None
        # None until the service has answered.
        self.needs_tokens: bool | None = None

    def check(self) -> None:
        """Raises HttpError if other machines reach this gateway and the service lets everybody in."""
        if self._settings.is_public and not self.needs_tokens:
            raise unavailable("the service asks for no tokens, so this address of the gateway is closed")

    async def start(self) -> None:
        """Asks the service for the first time. Raises SettingError if the flags of TLS do not suit it."""
        await self._look()
        if self._fault is not None:
            raise SettingError(self._fault)
        if self.needs_tokens is None:
            log.warning(
                "the service at %s does not answer yet; requests are refused until it does", self._settings.address
            )

    async def _look(self) -> None:
        found = await self._service.needs_tokens(_LOOK_SECONDS)
        self._fault = None
        if found is None:
            self._fault = await asyncio.to_thread(fault, self._settings.address, self._settings.service_tls_settings)
        if found is None or found == self.needs_tokens:
            return
        self.needs_tokens = found
        if self._settings.is_public and not found:
            log.error("the service asks for no tokens: every machine could use it; requests are refused until it does")

    async def run(self) -> NoReturn:
        """Looks again and again: the service may be started again with other settings."""
        while True:
            await asyncio.sleep(_FIRST_LOOK_SECONDS if self.needs_tokens is None else _LOOK_SECONDS)
            before = self._fault
            await self._look()
            if self._fault is not None and self._fault != before:
                log.error("%s", self._fault)
