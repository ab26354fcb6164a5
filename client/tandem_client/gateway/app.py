"""The gateway as an ASGI application of Starlette: which path is answered how, and what goes wrong.

Owns the endpoints that are one question to the service, and the end of a gateway in order: new requests are refused
with a time to come again, and their connections end; those in work go on.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tandem.v1 import control_pb2, inference_pb2

from tandem_client.connection import Metadata
from tandem_client.gateway.accepting import Seats
from tandem_client.gateway.admission import METRICS, Admission, Callers, metadata_of
from tandem_client.gateway.cors import Cors
from tandem_client.gateway.errors import SERVER, HttpError, unavailable
from tandem_client.gateway.exchange import Answer, bearer, header, refusal, too_large, values
from tandem_client.gateway.generation import Generation
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.openai.bodies import Detokenize, TokenizeChat, TokenizeText
from tandem_client.gateway.openai.fields import read
from tandem_client.gateway.openai.openapi import description
from tandem_client.gateway.openai.paths import missing
from tandem_client.gateway.openai.wanted import CHAT, COMPLETION, Wanted, chat, chat_completion, completion
from tandem_client.gateway.service import SHUTTING_DOWN, Guard, Service
from tandem_client.gateway.settings import Settings
from tandem_contract.version import version

# A probe of an orchestrator waits for a second or more.
_HEALTH_SECONDS = 1.0
_DETOKENIZE: Mapping[str, str] = {"token_ids": "tokens"}

log = logging.getLogger("tandem.gateway")

Handler = Callable[[Request, Metadata], Awaitable[Response]]
_PAGE = "text/plain; version=0.0.4; charset=utf-8"
_HEALTH = "/health"
# They say nothing of requests, and are answered while the gateway drains.
_ALWAYS = frozenset(("/livez", "/metrics", "/version", "/openapi.json"))


class App(Starlette):
    def __init__(self, settings: Settings, service: Service, meter: Meter, guard: Guard, seats: Seats) -> None:
        self.gate, self._service, self._meter = Gate(), service, meter
        self._admission = admission = Admission(settings, guard, Callers(service), seats)
        self._created, self._version = int(time.time()), version()
        self._description: asyncio.Task[str] | None = None

        def made(read: Callable[[dict[str, object]], Wanted]) -> Handler:
            async def generate(request: Request, metadata: Metadata) -> Response:
                wanted = read(values(request))
                return Generation(wanted, request, metadata, service, meter, settings.ping_seconds)

            generate.__name__ = read.__name__
            return generate

        # Path, what it has, the endpoint's name in metrics, handler, method, and the owner of its requests' places.
        table: list[tuple[str, str, str, Handler, str, Admission | None]] = [
            ("/", "these paths", "other", self.index, "GET", None),
            ("/v1/chat/completions", "answers a conversation", "chat", made(chat_completion), "POST", admission),
            ("/v1/completions", "continues a text", "completions", made(completion), "POST", admission),
            ("/v1/models", "the served model", "models", self.models, "GET", admission),
            ("/v1/models/{name:path}", "the model of this name", "models", self.model, "GET", admission),
            ("/tokenize", "text or a conversation to token ids", "tokenize", self.tokenize, "POST", admission),
            ("/detokenize", "token ids to text", "detokenize", self.detokenize, "POST", admission),
            (_HEALTH, "whether a request that arrives is computed", "health", self.health, "GET", None),
            ("/livez", "whether the gateway's process answers", "health", self.live, "GET", None),
            ("/metrics", "the counters of the gateway, for Prometheus", "other", self.metrics, "GET", None),
            ("/version", "the version", "other", self.version, "GET", None),
            ("/openapi.json", "the description of this API", "other", self.openapi, "GET", None),
        ]
        self._about = {path: about for path, about, *_ in table}
        self._origins = settings.origins
        super().__init__(
            routes=[
                Route(path, _Endpoint(name, handler, place), methods=[method], name=handler.__name__)
                for path, _, name, handler, method, place in table
            ],
            exception_handlers={HttpError: self._refused, HTTPException: self._refused, Exception: self._refused},
        )
        self.router.redirect_slashes = False

    def build_middleware_stack(self) -> ASGIApp:
        """Puts around Starlette's own, which answers errors last of all, what concerns every answer."""
        self.gate.app = super().build_middleware_stack()
        return Cors(self.gate, self._origins) if self._origins else self.gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, and counts it by endpoint and outcome."""
        if scope["type"] != "http":
            return
        # What is kept of the request: its body once it was read, its endpoint in metrics, the status of its answer.
        state = scope["state"]
        state.update(began_at=time.perf_counter(), body=None, endpoint="other", status=500)
        self._meter.add("requests_in_work")
        try:
            await super().__call__(scope, receive, send)
        except (ClientDisconnect, asyncio.CancelledError):
            # The client left, stopped reading, or the process stops. The server closes the connection.
            state["status"] = "left"
        except Exception:
            log.exception("an error of the gateway at %s", state["endpoint"])
            state["status"] = 500
            raise
        finally:
            self._meter.add("requests_in_work", -1)
            self._meter.request(state["endpoint"], str(state["status"]))

    async def index(self, request: Request, metadata: Metadata) -> Response:
        routes = [route for route in self.routes if isinstance(route, Route)]
        paths = {f"{_methods(route.methods or ())} {route.path_format}": self._about[route.path] for route in routes}
        return _json({"name": "Tandem", "version": self._version, "paths": paths})

    async def models(self, request: Request, metadata: Metadata) -> Response:
        info = await self._service.model_info(metadata)
        return _json({"object": "list", "data": [self._described(info)]})

    async def model(self, request: Request, metadata: Metadata) -> Response:
        """GET /v1/models/{id}. Without an id it is the list, which clients that end a path with a slash want."""
        name, info = request.path_params["name"], await self._service.model_info(metadata)
        if not name:
            return await self.models(request, metadata)
        if name != info.model:
            message = f"model {name[:128]!r} is not served here; {info.model!r} is"
            raise HttpError(404, message, param="model", code="model_not_found")
        return _json(self._described(info))

    async def tokenize(self, request: Request, metadata: Metadata) -> Response:
        """POST /tokenize: a text or a conversation to token ids, as vLLM does."""
        given, service, inference = values(request), self._service, self._service.inference
        if given.get("messages") is None:
            body = read(TokenizeText, given)
            asked = inference_pb2.TokenizeRequest(
                model=body.model or "", text=body.prompt, add_special_tokens=body.add_special_tokens
            )
            answer = await service.ask(inference.Tokenize, asked, metadata, COMPLETION)
        else:
            body = read(TokenizeChat, given)
            asked = inference_pb2.RenderChatRequest(model=body.model or "", chat=chat(body))
            answer = await service.ask(inference.RenderChat, asked, metadata, CHAT)
        ids, info, texts = list(answer.token_ids), await service.model_info(metadata), None
        if body.return_token_strs:
            asked = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False, separately=True)
            texts = list((await service.ask(inference.Detokenize, asked, metadata)).texts)
        return _json({"count": len(ids), "max_model_len": info.max_length, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: Request, metadata: Metadata) -> Response:
        """POST /detokenize: token ids to text, as vLLM does."""
        body = read(Detokenize, values(request))
        asked = inference_pb2.DetokenizeRequest(
            model=body.model or "", token_ids=body.token_ids, skip_special_tokens=False
        )
        answer = await self._service.ask(self._service.inference.Detokenize, asked, metadata, _DETOKENIZE)
        return _json({"prompt": answer.text})

    async def health(self, request: Request, metadata: Metadata) -> Response:
        """GET /health: 200 only while a request that arrives is computed; else 503, a word for the reason, since when.

        Everyone may ask, so it has no sentence of the service.
        """
        try:
            why = await self._service.why_not_serving(metadata, _HEALTH_SECONDS)
        except HttpError as error:
            raise HttpError(503, error.message, kind=error.kind, code=error.code, headers=error.headers) from None
        if why is None:
            return _json({"status": "ok"})
        return _json({"status": "not serving", **why}, 503)

    async def live(self, request: Request, metadata: Metadata) -> Response:
        return _json({"status": "ok"})

    async def version(self, request: Request, metadata: Metadata) -> Response:
        return _json({"version": self._version})

    def _described(self, info: control_pb2.GetModelInfoResponse) -> dict[str, object]:
        name, length = info.model, info.max_length
        about = {"created": self._created, "owned_by": "tandem", "root": name, "parent": None, "max_model_len": length}
        return {"id": name, "object": "model", **about}

    async def metrics(self, request: Request, metadata: Metadata) -> Response:
        """GET /metrics. The rules are those of the service's own page."""
        await self._admission.need(request, METRICS)
        return Answer(self._meter.page(), media_type=_PAGE)

    async def openapi(self, request: Request, metadata: Metadata) -> Response:
        if self._description is None:
            # It takes a tenth of a second, once; streams go on beside a thread.
            self._description = asyncio.create_task(asyncio.to_thread(description, self.routes, self._about))
        return Answer(await asyncio.shield(self._description))

    async def _refused(self, request: Request, error: Exception) -> Response:
        """The answer for what was raised: by the gateway, by Starlette's router, or by a mistake."""
        path = request.scope["path"][:200]
        if isinstance(error, HttpError):
            return refusal(request, error)
        if not isinstance(error, HTTPException):
            return refusal(request, HttpError(500, "an error of the gateway; its log has more", kind=SERVER))
        code, message = None, f"{path}: {error.detail}"
        if error.status_code == 404:
            code, message = "not_found", missing(path, self._about, header(request, "host"))
        elif error.status_code == 405:
            allowed = _methods((error.headers or {}).get("Allow", "").split(", "))
            message = f"{request.method[:16]} is not a method of {path}; it takes {allowed}"
        return refusal(request, HttpError(error.status_code, message, code=code, headers=error.headers or {}))


def _methods(names: Collection[str]) -> str:
    """The methods of a path. A path with GET takes HEAD too."""
    return " and ".join(sorted(name for name in names if name != "HEAD"))


def _json(value: Mapping[str, object], status: int = 200) -> Response:
    return Answer(json.dumps(value), status)


class _Endpoint:
    """One path. Its request keeps its place until the answer is sent."""

    def __init__(self, name: str, handler: Handler, admission: Admission | None) -> None:
        self._name, self._handler, self._admission = name, handler, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request.state.endpoint, request.state.token = self._name, bearer(request)
        metadata = metadata_of(request)
        async with self._admission.admitted(request) if self._admission else contextlib.nullcontext():
            answer = await self._handler(request, metadata)
            await answer(scope, receive, send)


class Gate:
    """Refuses headers that are too large, and requests while the gateway drains. Counts those that it lets pass."""

    app: ASGIApp

    def __init__(self) -> None:
        self.num_in_work = 0
        # Unix time from which on it refuses requests; 0 before.
        self.drains_since = 0.0
        # Set when the last request in work has ended.
        self.changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(Request(scope))
        if refused is not None:
            await refused(scope, receive, send)
            return
        self.num_in_work += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_in_work -= 1
            if not self.num_in_work:
                self.changed.set()

    def _refusal(self, request: Request) -> Response | None:
        path = request.scope["path"]
        if (error := too_large(request.scope)) is not None:
            return refusal(request, error)
        if not self.drains_since or path in _ALWAYS:
            return None
        error = unavailable("the gateway is draining: it takes no new requests")
        error.headers = {**error.headers, "connection": "close"}
        if path != _HEALTH:
            return refusal(request, error)
        why = {"status": "not serving", "reason": SHUTTING_DOWN, "since": self.drains_since}
        return Answer(json.dumps(why), error.status, error.headers)
