"""The application by itself: asked without a socket, before a service that notes what it is asked."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import uvicorn
from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2
from uvicorn.server import ServerState

from tandem_client.gateway.accepting import SEAT, Seats
from tandem_client.gateway.app import App
from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.protocol import bounded
from tandem_client.gateway.settings import PROGRAM

Ask = Callable[..., httpx.Response]
MODEL = "folder/toy"


class Noting:
    """A service that notes its requests. It accepts no completion: its answer is an error of the status 418."""

    def __init__(self) -> None:
        self.requests = list[Message]()
        self.inference = SimpleNamespace(
            Generate=self._generate, Tokenize="Tokenize", RenderChat="RenderChat", Detokenize="Detokenize"
        )

    def _generate(self, request: inference_pb2.GenerateRequest, metadata: object) -> Any:
        self.requests.append(request)
        raise HttpError(418, "noted")

    async def model_info(self, metadata: object) -> control_pb2.GetModelInfoResponse:
        return control_pb2.GetModelInfoResponse(model=MODEL, max_length=1024)

    async def model_name(self, metadata: object) -> str:
        return MODEL

    async def ask(self, method: str, request: Any, *_: object) -> Message:
        self.requests.append(request)
        match method:
            case "Tokenize":
                return inference_pb2.TokenizeResponse(token_ids=[1])
            case "RenderChat":
                return inference_pb2.RenderChatResponse(token_ids=[1])
            case _:
                return inference_pb2.DetokenizeResponse(texts=["a"] if request.separately else [])


class Mistaken:
    """A service that answers every call with a wrong message."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("something private")


class Open:
    """A guard of a service without tokens."""

    needs_tokens: bool | None = False

    def check(self) -> None: ...


class Wire(asyncio.Transport):
    """Notes whether it is read, and what is written."""

    is_read, written, is_closed = True, b"", False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def connection(parser: type[Any], app: Any, *flags: str) -> tuple[Any, Wire, Seats]:
    """A connection of a gateway with these flags to the application, its transport, and the one seat, which it has."""
    config = uvicorn.Config(app, loop="none", ws="none", lifespan="off", log_config=None)
    seats, wire = Seats(Meter(), max_connections=1), Wire()
    kind = bounded(parser, seats, PROGRAM.read(["--head-seconds", "60", *flags], {}))
    made = kind(config=config, server_state=ServerState(), app_state={SEAT: seats.take("a")})
    made.connection_made(wire)
    return made, wire, seats


def asker(service: Any, *flags: str, guard: Any = None) -> Ask:
    """Returns what sends a request to the application of a gateway with these flags."""
    seats = Seats(Meter(), max_connections=1)
    seat = seats.take("a")
    app = App(PROGRAM.read(flags, {}), service, Meter(), guard or Open(), seats)

    async def seated(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {SEAT: seat}
        await app(scope, receive, send)

    async def send(method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(seated, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.request(method, path, **more)

    return lambda method, path, **more: asyncio.run(send(method, path, **more))
