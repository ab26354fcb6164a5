"""Certificates that follow changes of their files without a restart, as those of the service do.

Owns when files are read again. Files that cannot be used are reported once, and what was read before stays in force.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

log = logging.getLogger("tandem.gateway")

_LOOK_SECONDS = 1.0
_State = tuple[tuple[int, int, int], ...] | None


class Followed:
    """Some files, and what is done with them."""

    def __init__(self, paths: Sequence[Path | None], use: Callable[[], object]) -> None:
        """`use` reads the files. It raises OSError (SSLError too) or ValueError, and changes nothing then."""
        self._paths = [path for path in paths if path is not None]
        self._use = use
        self._state = self._look()

    def look(self) -> None:
        """Reads the files again if they have changed. Call it about once a second."""
        if (state := self._look()) == self._state:
            return
        self._state = state
        names = ", ".join(map(str, self._paths))
        try:
            self._use()
        except (OSError, ValueError) as error:
            log.error("%s cannot be used: %s; what was read before stays in force", names, error)
        else:
            log.info("%s was read again", names)

    def _look(self) -> _State:
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)


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
