"""The gateway as an ASGI application: which path is answered how, who may have how many requests, what goes wrong.

Owns routing and admission: who calls is found out before anything else of a request. `generation` runs completions and
chats; `simple` the rest.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tandem_client.credentials import Metadata
from tandem_client.gateway import simple
from tandem_client.gateway.errors import SERVER, HttpError, overloaded, unauthenticated, unavailable
from tandem_client.gateway.generation import Generation
from tandem_client.gateway.http.event_stream import Pulse
from tandem_client.gateway.http.exchange import Exchange, Left, Message, Receive, Send
from tandem_client.gateway.http.seats import Seats
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.openai.chats import chat_completion
from tandem_client.gateway.openai.completions import completion
from tandem_client.gateway.openai.wanted import Wanted
from tandem_client.gateway.places import Places
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.upstream.callers import INFERENCE, METRICS, Callers
from tandem_client.gateway.upstream.guard import Guard
from tandem_client.gateway.upstream.service import Service

log = logging.getLogger("tandem.gateway")

# The memory that bodies may take while they arrive.
_BODY_ROOM_BYTES = 256 * 2**20
_FULL_SECONDS = 1.0
# As the service reads.
_MAX_TRACE_CHARS = 256
Handler = Callable[[Exchange, Metadata], Awaitable[None]]


class App:
    """The application of one process."""

    def __init__(self, settings: Settings, service: Service, meter: Meter, guard: Guard, seats: Seats) -> None:
        self._settings, self._service, self._meter, self._guard = settings, service, meter, guard
        self._seats = seats
        self._callers = Callers(service)
        self._room = Places(_BODY_ROOM_BYTES, is_shared=True)
        self._places = Places(settings.max_requests)
        self.pulse = Pulse(settings.ping_seconds)
        asks = simple.Simple(service)
        # Path: the endpoint's name in metrics, its method, its handler, and whether it takes one of the places.
        self._routes: dict[str, tuple[str, str, Handler, bool]] = {
            "/v1/completions": ("completions", "POST", self._completions, True),
            "/v1/chat/completions": ("chat", "POST", self._chats, True),
            "/tokenize": ("tokenize", "POST", self._with_body(asks.tokenize), True),
            "/detokenize": ("detokenize", "POST", self._with_body(asks.detokenize), True),
            "/v1/models": ("models", "GET", asks.models, True),
            "/health": ("health", "GET", asks.health, False),
            "/livez": ("health", "GET", asks.live, False),
            "/version": ("other", "GET", asks.version, False),
            "/metrics": ("other", "GET", self._metrics, False),
        }
        self._model = asks.model

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        endpoint, outcome, exchange = "other", "500", None
        self._meter.add("requests_in_work")
        try:
            try:
                exchange = Exchange(scope, receive, send)
                endpoint, handler, is_counted = self._route(exchange)
                await self._admitted(exchange, handler, is_counted=is_counted)
            except HttpError as error:
                exchange = exchange or Exchange({**scope, "headers": []}, receive, send)
                await exchange.refuse(error)
            outcome = str(exchange.status)
        except (Left, asyncio.CancelledError):
            # The client left, stopped reading, or the process stops. The server closes the connection.
            outcome = "left"
        except Exception:
            log.exception("an error of the gateway at %s", endpoint)
            if exchange is None or exchange.status:
                raise  # The server closes the connection.
            await exchange.refuse(HttpError(500, "an error of the gateway; its log has more", kind=SERVER))
        finally:
            self._meter.add("requests_in_work", -1)
            self._meter.request(endpoint, outcome)

    def _route(self, exchange: Exchange) -> tuple[str, Handler, bool]:
        path = exchange.path
        found = self._routes.get(path)
        if found is None and path.startswith("/v1/models/"):
            found = ("models", "GET", self._model, True)
        if found is None:
            raise HttpError(404, f"there is no {path[:200]}", code="not_found")
        endpoint, method, handler, is_counted = found
        if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
            raise HttpError(
                405, f"{path} takes {method}, not {exchange.method[:20]}", headers=((b"allow", method.encode()),)
            )
        return endpoint, handler, is_counted

    async def _admitted(self, exchange: Exchange, handler: Handler, *, is_counted: bool) -> None:
        token = exchange.bearer()
        metadata: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        trace = exchange.header(b"traceparent")
        # A malformed one is ignored, as the standard says; gRPC would refuse the call.
        if trace.isascii() and trace.isprintable() and 0 < len(trace) <= _MAX_TRACE_CHARS:
            metadata = (*metadata, ("traceparent", trace))
        if not is_counted:
            await handler(exchange, metadata)
            return
        caller = token or ""
        rights = await self._rights(token)
        if exchange.method == "POST":
            _need(rights, INFERENCE, exchange.path)
        if self._guard.needs_tokens is False:
            # Everybody may call. Bodies that come slowly take no places.
            caller = exchange.seat.address
            await self._read(exchange, caller)
        self._seats.know(exchange.seat)
        await self._take(caller)
        self._seats.begin(exchange.seat)
        try:
            await self._read(exchange, caller)
            await handler(exchange, metadata)
        finally:
            self._seats.rest(exchange.seat)
            self._places.leave(caller)

    async def _rights(self, token: str | None) -> frozenset[str] | None:
        """Returns the rights of the caller; None if everybody has all of them. Raises HttpError, 401 for one.

        Nothing of a body has been read by then.
        """
        self._guard.check()
        if self._guard.needs_tokens is False:
            return None
        if token is None:
            # Without an answer of the service, nobody knows whether it would ask for a token.
            if self._guard.needs_tokens is None:
                raise unavailable(f"the service at {self._settings.address} does not answer")
            raise unauthenticated("a token is needed: the header 'authorization: Bearer TOKEN'")
        return await self._callers.rights(token)

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

    async def _read(self, exchange: Exchange, caller: str) -> None:
        """Reads the body of a request that has one, and has not been read."""
        if exchange.method != "POST" or exchange.has_body:
            return
        settings = self._settings
        await exchange.read(
            self._room, caller, max_bytes=settings.max_body_bytes, head_seconds=settings.head_seconds,
            seconds=settings.body_seconds,
        )  # fmt: skip

    async def _completions(self, exchange: Exchange, metadata: Metadata) -> None:
        await self._generate(completion(exchange.values()), exchange, metadata)

    async def _chats(self, exchange: Exchange, metadata: Metadata) -> None:
        await self._generate(chat_completion(exchange.values()), exchange, metadata)

    async def _generate(self, wanted: Wanted, exchange: Exchange, metadata: Metadata) -> None:
        generation = Generation(wanted, exchange, metadata, service=self._service, meter=self._meter, pulse=self.pulse)
        await _while_present(exchange, generation.run())

    def _with_body(
        self, handler: Callable[[Exchange, Metadata, dict[str, object]], Awaitable[None]]
    ) -> Handler:  # fmt: skip
        async def read_first(exchange: Exchange, metadata: Metadata) -> None:
            await handler(exchange, metadata, exchange.values())

        return read_first

    async def _metrics(self, exchange: Exchange, metadata: Metadata) -> None:
        """The rules are those of the service's own page."""
        _need(await self._rights(exchange.bearer()), METRICS, exchange.path)
        await exchange.answer(
            200, self._meter.page(), ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)
        )


def _need(rights: frozenset[str] | None, right: str, path: str) -> None:
    """Raises HttpError if the caller lacks the right."""
    if rights is not None and right not in rights:
        message = f"{path} needs the right {right}; the token has {', '.join(sorted(rights))}"
        raise HttpError(403, message, kind="permission_error", code="permission_denied")


async def _while_present(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Does the work until the client leaves. Raises Left then, after the work was cancelled."""
    working = asyncio.current_task()
    assert working is not None, "a request has a task"
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not has_left:
            raise
        working.uncancel()
        raise Left from None
    finally:
        watching.cancel()
