"""Whether the service answers and asks callers for tokens, and what follows: a public gateway serves only if it does.

The gateway has no token file, so it asks the service, by a call without a token. If no call reaches the service, a
handshake tells which flag of TLS is wrong.
"""

import asyncio
import logging
from typing import NoReturn

from tandem_client.gateway.errors import unavailable
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.upstream.service import Service
from tandem_client.gateway.upstream.setup import fault
from tandem_contract.settings import SettingError

log = logging.getLogger("tandem.gateway")

# Between two looks, and for one of them.
_LOOK_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 0.5


class Guard:
    """What is known about the service's door."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, self._settings = service, settings
        self._is_public = settings.is_public
        # Why no call reaches the service; None if that has another cause than the flags.
        self._fault: str | None = None
        # None until the service has answered.
        self.needs_tokens: bool | None = None

    def check(self) -> None:
        """Raises HttpError if other machines reach this gateway and the service lets everybody in."""
        if self._is_public and not self.needs_tokens:
            raise unavailable("the service asks for no tokens, so this address of the gateway is closed")

    async def start(self) -> None:
        """Asks the service for the first time. Raises SettingError if the flags of TLS do not suit it."""
        await self._look()
        if self._fault is not None:
            raise SettingError(self._fault)
        if self.needs_tokens is None:
            log.warning("the service at %s does not answer yet; requests are refused until it does", self.address)

    @property
    def address(self) -> str:
        """Of the service."""
        return self._settings.address

    async def _look(self) -> None:
        found = await self._service.needs_tokens(_LOOK_SECONDS)
        self._fault = None
        if found is None:
            self._fault = await asyncio.to_thread(fault, self.address, self._settings.service_tls_settings)
        if found is None or found == self.needs_tokens:
            return
        self.needs_tokens = found
        if self._is_public and not found:
            log.error("the service asks for no tokens: every machine could use it; requests are refused until it does")

    async def run(self) -> NoReturn:
        """Looks again and again: the service may be started again with other settings."""
        while True:
            await asyncio.sleep(_FIRST_LOOK_SECONDS if self.needs_tokens is None else _LOOK_SECONDS)
            before = self._fault
            await self._look()
            if self._fault is not None and self._fault != before:
                log.error("%s", self._fault)
