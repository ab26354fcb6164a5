"""The gateway as an ASGI application: which path is answered how, who may have how many requests, what goes wrong.

Owns routing and admission. `generation` runs completions and chats; `simple` the rest.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tandem_client.credentials import Metadata
from tandem_client.gateway import simple
from tandem_client.gateway.errors import SERVER, HttpError, overloaded
from tandem_client.gateway.generation import Generation
from tandem_client.gateway.http.event_stream import Pulse
from tandem_client.gateway.http.exchange import BodyRoom, Exchange, Left, Message, Receive, Send
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.openai.chats import chat_completion
from tandem_client.gateway.openai.completions import completion
from tandem_client.gateway.openai.wanted import Wanted
from tandem_client.gateway.places import Places
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.upstream.guard import Guard
from tandem_client.gateway.upstream.service import Service
from tandem_client.gateway.upstream.token_texts import TokenTexts

log = logging.getLogger("tandem.gateway")

# The memory that bodies may take while they arrive.
_BODY_ROOM_BYTES = 256 * 2**20
_FULL_SECONDS = 1.0
# As the service reads.
_MAX_TRACE_CHARS = 256
Handler = Callable[[Exchange, Metadata], Awaitable[None]]


class App:
    """The application of one process."""

    def __init__(self, settings: Settings, service: Service, meter: Meter, guard: Guard) -> None:
        self._settings, self._service, self._meter, self._guard = settings, service, meter, guard
        self._texts = TokenTexts(service)
        self._room = BodyRoom(_BODY_ROOM_BYTES)
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
        self._guard.check()
        # Only where the service asks for tokens are there several callers.
        self._places.is_shared = bool(self._guard.needs_tokens)
        caller = token or ""
        if not self._places.take(caller):
            limit = self._places.limit(caller)
            if self._places.is_shared:
                # A caller that sends again at once, whatever the retry hint says, would keep the process busy.
                await asyncio.sleep(random.uniform(0.5, 1.0) * _FULL_SECONDS)
            message = f"{limit} requests of this key are in work, which is its share of {self._settings.max_requests}"
            raise overloaded(message, seconds=_FULL_SECONDS, code="too_many_requests")
        try:
            await handler(exchange, metadata)
        finally:
            self._places.leave(caller)

    async def _body(self, exchange: Exchange) -> dict[str, object]:
        settings = self._settings
        return await exchange.json(self._room, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)

    async def _completions(self, exchange: Exchange, metadata: Metadata) -> None:
        await self._generate(completion(await self._body(exchange)), exchange, metadata)

    async def _chats(self, exchange: Exchange, metadata: Metadata) -> None:
        await self._generate(chat_completion(await self._body(exchange)), exchange, metadata)

    async def _generate(self, wanted: Wanted, exchange: Exchange, metadata: Metadata) -> None:
        generation = Generation(
            wanted, exchange, metadata, service=self._service, texts=self._texts, meter=self._meter, pulse=self.pulse
        )
        await _while_present(exchange, generation.run())

    def _with_body(
        self, handler: Callable[[Exchange, Metadata, dict[str, object]], Awaitable[None]]
    ) -> Handler:  # fmt: skip
        async def read_first(exchange: Exchange, metadata: Metadata) -> None:
            await handler(exchange, metadata, await self._body(exchange))

        return read_first

    async def _metrics(self, exchange: Exchange, metadata: Metadata) -> None:
        await exchange.answer(
            200, self._meter.page(), ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)
        )


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
