"""One HTTP request and its answer, over ASGI: headers, the body within its bounds, JSON, and what is sent.

Owns the bounds of a body in bytes, seconds and nesting. Knows nothing of the API.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn, cast

from tandem_client.gateway.errors import Headers, HttpError, unauthenticated
from tandem_client.gateway.http.seats import SEAT, Seat
from tandem_client.gateway.places import Places

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
# After the first seconds a body must have come at this rate.
_BYTES_PER_SECOND = 16_384
# A connection goes on behind a body that was not wanted only if its length is known, and not larger than this.
_MAX_SKIPPED_BYTES = 65_536
# A caller that is not known has no more requests on its connection; a body that is late might still come.
_FINAL = (401, 408)


class Left(Exception):
    """The client went away before its request was complete."""


class Exchange:
    """A request and its answer."""

    __slots__ = ("_body", "_send", "began_at", "headers", "method", "path", "receive", "seat", "status")

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Raises HttpError if the headers are too large."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.receive, self._send = receive, send
        self.seat: Seat = scope["state"][SEAT]
        # None until it was read.
        self._body: bytes | None = None
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
            raise unauthenticated(
                f"the authorization header must be 'Bearer TOKEN', at most {_MAX_TOKEN_CHARS} printable characters"
            )
        return token

    @property
    def has_body(self) -> bool:
        """Whether the body was read."""
        return self._body is not None

    @property
    def _length(self) -> int | None:
        """Of the body, as the headers say; None if they do not. h11 and httptools refuse other forms than a number."""
        given = self.header(b"content-length")
        if given.isdecimal():
            return int(given)
        return None if self.header(b"transfer-encoding") else 0

    async def read(self, room: Places, caller: str, *, max_bytes: int, head_seconds: float, seconds: float) -> None:
        """Reads the body. Raises HttpError, and Left if the client goes away.

        It must be complete after `seconds`, and after `head_seconds` come at _BYTES_PER_SECOND at least. What has come
        takes room of the caller.
        """
        size = self._length
        if size is not None and size > max_bytes:
            _refuse_size(size, max_bytes)
        kind = self.header(b"content-type").partition(";")[0].lower()
        if kind not in ("", "application/json"):
            raise HttpError(415, f"the content type is {kind[:60]}; it must be application/json")
        self._refuse_codings()
        pieces, size, loop = list[bytes](), 0, asyncio.get_running_loop()
        began_at = loop.time()
        try:
            async with asyncio.timeout(min(head_seconds, seconds)) as limit:
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise Left
                    piece: bytes = message.get("body", b"")
                    if size + len(piece) > max_bytes:
                        _refuse_size(size + len(piece), max_bytes)
                    if not room.take(caller, len(piece)):
                        raise HttpError(503, "too many large requests arrive at once", kind="service_unavailable_error")
                    size += len(piece)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        break
                    limit.reschedule(began_at + min(seconds, head_seconds + size / _BYTES_PER_SECOND))
        except TimeoutError:
            message = f"the body was not complete after {seconds:g} s, or came at less than {_BYTES_PER_SECOND} bytes/s"
            raise HttpError(408, message, kind="timeout_error") from None
        finally:
            room.leave(caller, size)
        self._body = b"".join(pieces)

    def _refuse_codings(self) -> None:
        """Refuses a body that is compressed: its length says nothing of what it becomes."""
        for name, wanted in ((b"content-encoding", "identity"), (b"transfer-encoding", "chunked")):
            given = self.header(name).lower()
            if given not in ("", wanted):
                said = name.decode().replace("-", " ")
                message = f"the {said} is {given[:60]}; it must be {wanted}: send the body without compression"
                raise HttpError(415, message, headers=((b"accept-encoding", b"identity"),))

    def values(self) -> dict[str, object]:
        """Returns the JSON object in the body, which was read. Raises HttpError."""
        body, self._body = self._body, b""
        assert body is not None, "the body was not read"
        return parsed(body)

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
        """Sends an error as the answer. Ends the connection if the body was not read and would have to be skipped."""
        headers: Headers = (JSON_TYPE, *error.headers)
        is_long = self._length is None or self._length > _MAX_SKIPPED_BYTES
        if self._body is None and (is_long or error.status in _FINAL or self.headers.get(b"expect")):
            headers = (*headers, (b"connection", b"close"))
        await self.answer(error.status, error.body(), headers)


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
    raise HttpError(413, f"the body has {size:,} bytes; the limit is {limit:,}", code="request_too_large")
