"""Who may have how many requests: who calls is found out before anything else of a request, and its body read after.

Owns the places of requests and the room of bodies, each shared between callers.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from typing import cast

from starlette.requests import Request

from tandem_client.connection import Metadata
from tandem_client.gateway.errors import HttpError, overloaded, unauthenticated, unavailable
from tandem_client.gateway.http.exchange import header, read
from tandem_client.gateway.http.seats import Seat, Seats
from tandem_client.gateway.places import Places
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.upstream.callers import INFERENCE, Callers
from tandem_client.gateway.upstream.guard import Guard

# The memory that bodies may take while they arrive.
_BODY_ROOM_BYTES = 256 * 2**20
_FULL_SECONDS = 1.0
# As the service reads.
_MAX_TRACE_CHARS = 256


class Admission:
    """Of one process."""

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
            # Without an answer of the service, nobody knows whether it would ask for a token.
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
            # A caller that sends again at once, whatever the retry hint says, would keep the process busy.
            await asyncio.sleep(random.uniform(0.5, 1.0) * _FULL_SECONDS)
        message = f"{limit} requests of this key are in work, which is its share of {self._settings.max_requests}"
        raise overloaded(message, seconds=_FULL_SECONDS, code="too_many_requests")

    async def _read(self, request: Request, caller: str) -> None:
        """Reads the body of a request that has one, and has not been read."""
        if request.method != "POST" or request.state.body is not None:
            return
        settings = self._settings
        await read(
            request, self._room, caller, max_bytes=settings.max_body_bytes, head_seconds=settings.head_seconds,
            seconds=settings.body_seconds,
        )  # fmt: skip


def metadata_of(request: Request) -> Metadata:
    """What goes on to the service with each call of a request."""
    token, trace = request.state.token, header(request, "traceparent")
    metadata: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    # A malformed one is ignored, as the standard says; gRPC would refuse the call.
    if trace.isascii() and trace.isprintable() and 0 < len(trace) <= _MAX_TRACE_CHARS:
        metadata = (*metadata, ("traceparent", trace))
    return metadata
