"""Who calls, found out before a body is read: the service is asked by the token, and its answer kept for a moment.

Owns the answers, by a keyed hash of the token. They only decide what is read and who sees the metrics: the service
looks at the token of each call itself.
"""

import asyncio
import hashlib
import secrets
from typing import TypeVar

from tandem_client.connection import Metadata
from tandem_client.gateway.errors import HttpError, unavailable
from tandem_client.gateway.upstream.service import Service

# A revoked token is noticed by the service in less than two seconds; these come on top, for what the gateway decides.
KNOWN_SECONDS, REFUSED_SECONDS = 0.5, 0.25
# Answers that are kept, the newest ones; those of refused tokens apart, so that they push no others out.
_MAX_KNOWN, _MAX_REFUSED = 4096, 1024
# Tokens that the service is asked for at once.
_MAX_ASKED = 256

INFERENCE, METRICS = "inference", "metrics"
_Answer = TypeVar("_Answer")


class Callers:
    """The rights of tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._secret = secrets.token_bytes(32)
        # The rights, or the refusal, and until when on the loop's clock.
        self._known: dict[bytes, tuple[frozenset[str], float]] = {}
        self._refused: dict[bytes, tuple[HttpError, float]] = {}
        self._asked: dict[bytes, asyncio.Task[frozenset[str]]] = {}

    async def rights(self, token: str) -> frozenset[str]:
        """Returns the rights of a token. Raises HttpError: 401, or 503 if the service does not say."""
        key = hashlib.blake2b(token.encode(), key=self._secret, digest_size=16).digest()
        now = asyncio.get_running_loop().time()
        if (known := self._known.get(key)) is not None and now < known[1]:
            return known[0]
        if (refused := self._refused.get(key)) is not None and now < refused[1]:
            # The same exception is raised many times, so the traceback of the last time is removed.
            raise refused[0].with_traceback(None)
        task = self._asked.get(key)
        if task is None:
            if len(self._asked) >= _MAX_ASKED:
                raise unavailable(f"{len(self._asked)} tokens are looked up; the limit is {_MAX_ASKED}")
            task = self._asked[key] = asyncio.create_task(self._ask(key, token))
            # Retrieves the exception, because every caller may have left.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # If one caller leaves, the others still get the answer.
        return await asyncio.shield(task)

    async def _ask(self, key: bytes, token: str) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        metadata: Metadata = (("authorization", f"Bearer {token}"),)
        self._known.pop(key, None)
        self._refused.pop(key, None)
        try:
            found = await self._service.rights(metadata)
        except HttpError as error:
            if error.status == 401:
                _trim(self._refused, _MAX_REFUSED)
                self._refused[key] = error, loop.time() + REFUSED_SECONDS
            raise
        finally:
            del self._asked[key]
        _trim(self._known, _MAX_KNOWN)
        self._known[key] = found, loop.time() + KNOWN_SECONDS
        return found


def _trim(answers: dict[bytes, _Answer], limit: int) -> None:
    """Makes room for one more: the oldest answer goes."""
    while len(answers) >= limit:
        del answers[next(iter(answers))]
