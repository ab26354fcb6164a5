"""One HTTP request and its answer, over ASGI: headers, the body within its bounds, JSON, and what is sent.

Owns the bounds of a body in bytes, seconds and nesting. Knows nothing of the API.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn, cast

from tandem_client.gateway.errors import Headers, HttpError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE = (b"content-type", b"application/json")
MAX_HEADER_BYTES = 32_768
# The connection keeps this much of an answer for a reader that is slow, and the request keeps its place meanwhile.
_PIECE_BYTES = 65_536
# A token of the service has 50 characters; the service takes at most 512.
_MAX_TOKEN_CHARS = 512
_SCHEME = "bearer "


class Left(Exception):
    """The client went away before its request was complete."""


class BodyRoom:
    """The memory that the bodies of all requests may take together."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Takes room; returns False if there is too little."""
        if num_bytes > self._free:
            return False
        self._free -= num_bytes
        return True

    def leave(self, num_bytes: int) -> None:
        """Gives room back."""
        self._free += num_bytes


class Exchange:
    """A request and its answer."""

    __slots__ = ("_send", "began_at", "headers", "method", "path", "receive", "status")

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Raises HttpError if the headers are too large."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.receive, self._send = receive, send
        self.began_at = time.perf_counter()
        # Of the answer; 0 until it has begun.
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        for name, value in cast(list[tuple[bytes, bytes]], scope["headers"]):
            # Joined, so that two values of one header are neither.
            self.headers[name] = self.headers[name] + b"," + value if name in self.headers else value
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise HttpError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def header(self, name: bytes) -> str:
        """Returns a header's value as text; empty without one."""
        return self.headers.get(name, b"").decode("latin-1").strip()

    def bearer(self) -> str | None:
        """Returns the caller's token. Raises HttpError if the header has another form."""
        given = self.header(b"authorization")
        if not given:
            return None
        token = given[len(_SCHEME) :].strip()
        fits = given[: len(_SCHEME)].lower() == _SCHEME and len(given) <= _MAX_TOKEN_CHARS
        if not (fits and token and token.isascii() and token.isprintable() and " " not in token):
            message = (
                f"the authorization header must be 'Bearer TOKEN', at most {_MAX_TOKEN_CHARS} printable characters"
            )
            raise HttpError(401, message, kind="authentication_error", code="invalid_api_key")
        return token

    async def json(self, room: BodyRoom, *, max_bytes: int, seconds: float) -> dict[str, object]:
        """Reads the body, a JSON object. Raises HttpError, and Left if the client goes away."""
        given = self.header(b"content-length")
        # h11 and httptools refuse other forms.
        size = int(given) if given.isdecimal() else None
        if size is not None and size > max_bytes:
            _refuse_size(size, max_bytes)
        kind = self.header(b"content-type").partition(";")[0].lower()
        if kind not in ("", "application/json"):
            raise HttpError(415, f"the content type is {kind[:60]}; it must be application/json")
        try:
            async with asyncio.timeout(seconds):
                return await self._read(room, max_bytes)
        except TimeoutError:
            raise HttpError(408, f"the body was not complete after {seconds:g} s", kind="timeout_error") from None

    async def _read(self, room: BodyRoom, max_bytes: int) -> dict[str, object]:
        pieces, size = list[bytes](), 0
        try:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise Left
                piece: bytes = message.get("body", b"")
                if size + len(piece) > max_bytes:
                    _refuse_size(size + len(piece), max_bytes)
                if not room.take(len(piece)):
                    raise HttpError(503, "too many large requests arrive at once", kind="service_unavailable_error")
                size += len(piece)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return parsed(b"".join(pieces))
        finally:
            room.leave(size)

    async def start(self, status: int, headers: Headers) -> None:
        """Sends the first line and the headers."""
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def answer(self, status: int, body: bytes, headers: Headers = (JSON_TYPE,)) -> None:
        """Sends a whole answer."""
        await self.start(status, (*headers, (b"content-length", str(len(body)).encode())))
        for begin in range(0, max(1, len(body)), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            await self.send(body[begin:end], is_last=end >= len(body))

    async def refuse(self, error: HttpError) -> None:
        """Sends an error as the answer."""
        await self.answer(error.status, error.body(), (JSON_TYPE, *error.headers))


def parsed(body: bytes) -> dict[str, object]:
    """Returns the JSON object. Raises HttpError."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise HttpError(400, "the body is not valid: it is nested too deeply") from None
    except ValueError as error:
        # Also a number with more digits than Python converts, and text that is not UTF-8.
        raise HttpError(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body is not a JSON object")
    return cast(dict[str, object], value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _refuse_size(size: int, limit: int) -> NoReturn:
    message = f"the body has {size:,} bytes; the limit is {limit:,}"
    # The rest of the body is not read, so the connection cannot go on.
    raise HttpError(413, message, code="request_too_large", headers=((b"connection", b"close"),))
