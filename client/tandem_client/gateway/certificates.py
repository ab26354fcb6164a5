"""The gateway's certificates follow changes of their files without a restart, as those of the service do."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tandem_contract.certificates import Followed

_LOOK_SECONDS = 1.0


async def follow(files: Sequence[Followed]) -> NoReturn:
    """Looks for ever."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for each in files:
            each.look()


def load(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Lets a server's context show the certificate from now on. Raises OSError (SSLError too), ValueError."""
    # A pair that does not fit would leave the context with a half of it. An encrypted key would make OpenSSL ask.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    context.load_cert_chain(certificate, key, password="")
