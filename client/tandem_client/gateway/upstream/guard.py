"""Whether the service asks its callers for tokens, and the rule that follows: a public gateway serves only if it does.

The gateway has no token file, so it asks the service, by a call without a token.
"""

import asyncio
import logging
from typing import NoReturn

from tandem_client.gateway.errors import unavailable
from tandem_client.gateway.upstream.service import Service

log = logging.getLogger("tandem.gateway")

# Between two looks, and for one of them.
_LOOK_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 0.5


class Guard:
    """What is known about the service's door."""

    def __init__(self, service: Service, *, is_public: bool) -> None:
        self._service = service
        self._is_public = is_public
        # None until the service has answered.
        self.needs_tokens: bool | None = None

    def check(self) -> None:
        """Raises HttpError if other machines reach this gateway and the service lets everybody in."""
        if self._is_public and not self.needs_tokens:
            raise unavailable("the service asks for no tokens, so this address of the gateway is closed")

    async def look(self) -> None:
        """Asks the service."""
        found = await self._service.needs_tokens(_LOOK_SECONDS)
        if found is None or found == self.needs_tokens:
            return
        self.needs_tokens = found
        if self._is_public and not found:
            log.error("the service asks for no tokens: every machine could use it; requests are refused until it does")

    async def run(self) -> NoReturn:
        """Looks again and again: the service may be started again with other settings."""
        while True:
            await asyncio.sleep(_FIRST_LOOK_SECONDS if self.needs_tokens is None else _LOOK_SECONDS)
            await self.look()
