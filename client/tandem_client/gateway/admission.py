"""How many requests a caller may have: the caller is found before anything else of a request, and its body read after.

Owns the places of requests and the room of bodies, each shared between callers. The service is asked by the token, and
its answer kept for a moment, by a keyed hash of the token. Such an answer only decides what is read and which callers
see the metrics: the service looks at the token of each call itself.
"""

import asyncio
import contextlib
import hashlib
import random
import secrets
from collections.abc import AsyncGenerator
from typing import TypeVar, cast

from starlette.requests import Request

from tandem_client.connection import Metadata
from tandem_client.gateway.accepting import Seat, Seats
from tandem_client.gateway.errors import HttpError, retry_after, unauthenticated, unavailable
from tandem_client.gateway.exchange import Places, header, read
from tandem_client.gateway.service import Guard, Service
from tandem_client.gateway.settings import Settings
from tandem_contract.plural import numbered

# A revoked token is noticed by the service in less than two seconds; these come on top, for what the gateway decides.
KNOWN_SECONDS, REFUSED_SECONDS = 0.5, 0.25
# Answers that are kept, the newest ones; those of refused tokens apart, so that they push no others out.
_MAX_KNOWN, _MAX_REFUSED = 4096, 1024
# Tokens that the service is asked for at once.
_MAX_ASKED = 256

INFERENCE, METRICS = "inference", "metrics"
_Answer = TypeVar("_Answer")

# The memory that bodies may take while they arrive.
_BODY_ROOM_BYTES = 256 * 2**20
_FULL_SECONDS = 1.0
# As the service reads.
_MAX_TRACE_CHARS = 256


class Callers:
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
        if (answer := self._known.get(key)) is not None and now < answer[1]:
            return answer[0]
        if (refused := self._refused.get(key)) is not None and now < refused[1]:
            # The same exception is raised many times, so the traceback of the last time is removed.
            raise refused[0].with_traceback(None)
        task = self._asked.get(key)
        if task is None:
            if len(self._asked) >= _MAX_ASKED:
                raise unavailable(f"{numbered(len(self._asked), 'token', 'are')} looked up; the limit is {_MAX_ASKED}")
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
            rights = await self._service.rights(metadata)
        except HttpError as error:
            if error.status == 401:
                _trim(self._refused, _MAX_REFUSED)
                self._refused[key] = error, loop.time() + REFUSED_SECONDS
            raise
        finally:
            del self._asked[key]
        _trim(self._known, _MAX_KNOWN)
        self._known[key] = rights, loop.time() + KNOWN_SECONDS
        return rights


def _trim(answers: dict[bytes, _Answer], limit: int) -> None:
    """Makes room for one more: the oldest answer goes."""
    while len(answers) >= limit:
        del answers[next(iter(answers))]


class Admission:
    def __init__(self, settings: Settings, guard: Guard, callers: Callers, seats: Seats) -> None:
        self._settings, self._guard, self._callers, self._seats = settings, guard, callers, seats
        self._room = Places(_BODY_ROOM_BYTES, is_shared=True)
        self._places = Places(settings.max_requests)

    @contextlib.asynccontextmanager
    async def admitted(self, request: Request) -> AsyncGenerator[None]:
        """Gives a request its place, and reads its body. Raises HttpError."""
        caller, seat = cast(str, request.state.token or ""), cast(Seat, request.state.seat)
        await self.need(request, INFERENCE if request.method == "POST" else None)
        if self._guard.needs_tokens is False:
            # Everybody may call. Bodies that come slowly take no places.
            caller = seat.address
            await self._read(request, caller)
        self._seats.know(seat)
        await self._take(caller)
        self._seats.begin(seat)
        try:
            await self._read(request, caller)
            yield
        finally:
            self._seats.rest(seat)
            self._places.leave(caller)

    async def need(self, request: Request, right: str | None) -> None:
        """Raises HttpError if the caller is not known, or lacks a right. Nothing of a body has been read by then."""
        self._guard.check()
        if self._guard.needs_tokens is False:
            # Everybody has all rights.
            return
        token = request.state.token
        if token is None:
            # Without an answer of the service, it is unknown whether it would ask for a token.
            if self._guard.needs_tokens is None:
                raise unavailable(f"the service at {self._settings.address} does not answer")
            raise unauthenticated("a token is needed: the header 'authorization: Bearer TOKEN'")
        rights = await self._callers.rights(token)
        if right is not None and right not in rights:
            message = f"{request.scope['path']} needs the right {right}; the token has {', '.join(sorted(rights))}"
            raise HttpError(403, message, kind="permission_error", code="permission_denied")

    async def _take(self, caller: str) -> None:
        """Takes a place of the caller's share. Raises HttpError."""
        # Only where the service asks for tokens are there several callers.
        self._places.is_shared = bool(self._guard.needs_tokens)
        if self._places.take(caller):
            return
        limit = self._places.limit(caller)
        if self._places.is_shared:
            # A caller that sends again at once, against the retry hint, would keep the process busy.
            await asyncio.sleep(random.uniform(0.5, 1.0) * _FULL_SECONDS)
        message = (
            f"{numbered(limit, 'request')} of this key are in work, which is its share of {self._settings.max_requests}"
        )
        headers = retry_after(_FULL_SECONDS)
        raise HttpError(429, message, kind="rate_limit_error", code="too_many_requests", headers=headers)

    async def _read(self, request: Request, caller: str) -> None:
        """Reads the body of a request that has one, and has not been read."""
        if request.method == "POST" and request.state.body is None:
            await read(request, self._room, caller, self._settings)


def metadata_of(request: Request) -> Metadata:
    """What goes on to the service with each call of a request."""
    token, trace = request.state.token, header(request, "traceparent")
    metadata: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    # A malformed one is ignored, as the standard says; gRPC would refuse the call.
    if trace.isascii() and trace.isprintable() and 0 < len(trace) <= _MAX_TRACE_CHARS:
        metadata = (*metadata, ("traceparent", trace))
    return metadata
