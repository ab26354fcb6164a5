"""One HTTP request and its answer, beyond Starlette: a bounded body, JSON, answers in pieces, streams of events.

Owns the bounds of a body in bytes, seconds and nesting, and how callers share the gateway's requests or the memory of
bodies: a caller may have as many places as it leaves free. So one that takes the most leaves half of them, the next one
half of the rest, and so on. The service has the same rule for its streams. `protocol` ends a stream with a stalled
reader. Knows nothing of the API.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem_client.gateway.errors import HttpError, unauthenticated
from tandem_client.gateway.settings import Settings

MAX_HEADER_BYTES = 32_768
# The connection keeps this much of an answer for a reader that is slow, and the request keeps its place meanwhile.
_PIECE_BYTES = 65_536
# A token of the service has 50 characters; the service takes at most 512.
_MAX_TOKEN_CHARS = 512
_SCHEME = "bearer "
_JSON = "application/json"
# After the first seconds a body must have come at this rate.
_BYTES_PER_SECOND = 16_384
# A connection goes on behind a body that was not wanted only if its length is known, and not larger than this.
_MAX_SKIPPED_BYTES = 65_536
# A caller that is not known has no more requests on its connection; a body that is late might still come.
_FINAL = (401, 408)

# nginx would keep events back.
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no",
}  # fmt: skip
# Proxies cut streams that are silent for a minute or less. Clients ignore lines that begin with a colon.
PING = b": ping\n\n"
_TICKS_PER_PING = 3


class Places:
    """What is taken, by caller."""

    def __init__(self, num_places: int, *, is_shared: bool = False) -> None:
        self._num_places = num_places
        # Whether there are several callers; one alone may take all.
        self.is_shared = is_shared
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def limit(self, caller: str) -> int:
        """The most places that the caller may have now."""
        free = max(0, self._num_places - (self.num_taken - self._taken[caller]))
        return (free + 1) // 2 if self.is_shared else free

    def take(self, caller: str, number: int = 1) -> bool:
        """Takes places; returns False if the caller may not have that many more."""
        if self._taken[caller] + number > self.limit(caller):
            return False
        self._taken[caller] += number
        self.num_taken += number
        return True

    def leave(self, caller: str, number: int = 1) -> None:
        self.num_taken -= number
        self._taken[caller] -= number
        if not self._taken[caller]:
            del self._taken[caller]


class Answer(Response):
    """A whole answer, in pieces."""

    media_type = _JSON

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["status"] = self.status_code
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, max(1, len(self.body)), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            await send(
                {"type": "http.response.body", "body": self.body[begin:end], "more_body": end < len(self.body)}
            )  # fmt: skip


def header(request: Request, name: str) -> str:
    """Returns a header's value; empty without one. Joined, so that two values of one header are neither."""
    return ",".join(request.headers.getlist(name)).strip()


def bearer(request: Request) -> str | None:
    """Returns the caller's token. Raises HttpError if the header has another form."""
    given = header(request, "authorization")
    if not given:
        return None
    token = given[len(_SCHEME) :].strip()
    fits = given[: len(_SCHEME)].lower() == _SCHEME and len(given) <= _MAX_TOKEN_CHARS
    if not (fits and token and token.isascii() and token.isprintable() and " " not in token):
        raise unauthenticated(
            f"the authorization header must be 'Bearer TOKEN', at most {_MAX_TOKEN_CHARS} printable characters"
        )
    return token


def too_large(scope: Scope) -> HttpError | None:
    """The refusal of headers that are too large; None if they are not."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) <= MAX_HEADER_BYTES:
        return None
    return HttpError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")


def refusal(request: Request, error: HttpError) -> Answer:
    """The answer for an error. Ends the connection if the body was not read and would have to be skipped."""
    size, headers = _length(request), error.headers
    is_long = size is None or size > _MAX_SKIPPED_BYTES
    if request.state.body is None and (is_long or error.status in _FINAL or "expect" in request.headers):
        headers = {**headers, "connection": "close"}
    return Answer(error.body(), error.status, headers)


def _length(request: Request) -> int | None:
    """The length of the body by the headers; None without one. h11 and httptools refuse other forms than a number."""
    given = header(request, "content-length")
    if given.isdecimal():
        return int(given)
    return None if "transfer-encoding" in request.headers else 0


async def read(request: Request, room: Places, caller: str, settings: Settings) -> None:
    """Reads the body into the request's state. Raises HttpError, and ClientDisconnect if the client goes away.

    It must be complete in time, and after the first seconds come at _BYTES_PER_SECOND at least. What has come takes
    room of the caller.
    """
    max_bytes, head_seconds, seconds = settings.max_body_bytes, settings.head_seconds, settings.body_seconds
    _check_size(_length(request) or 0, max_bytes)
    page = header(request, "origin")
    _check_kind(header(request, "content-type"), is_foreign=bool(page) and not settings.allows(page))
    _refuse_codings(request)
    pieces, size, loop = list[bytes](), 0, asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with (
            asyncio.timeout(min(head_seconds, seconds)) as limit,
            contextlib.aclosing(request.stream()) as stream,
        ):
            async for piece in stream:
                _check_size(size + len(piece), max_bytes)
                if not room.take(caller, len(piece)):
                    raise HttpError(503, "too many large requests arrive at once", kind="service_unavailable_error")
                size += len(piece)
                pieces.append(piece)
                limit.reschedule(began_at + min(seconds, head_seconds + size / _BYTES_PER_SECOND))
    except TimeoutError:
        message = f"the body was not complete after {seconds:g} s, or came at less than {_BYTES_PER_SECOND} bytes/s"
        raise HttpError(408, message, kind="timeout_error") from None
    finally:
        room.leave(caller, size)
    request.state.body = b"".join(pieces)


def _check_kind(content_type: str, *, is_foreign: bool) -> None:
    """Refuses anything but JSON. `curl -d` calls JSON a form, and other clients call it text, bytes or nothing.

    `is_foreign`: a page of another site sends it, which may not call.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        raise HttpError(415, f"the content type is {kind[:60]}; a body is one JSON object, without parts and files")
    if is_foreign and kind != _JSON:
        # A browser sends a form of any page to any address, without a question. For JSON it asks first.
        shown = f"is {kind[:60]}" if kind else "is missing"
        raise HttpError(415, f"the content type {shown}; that of a web page's request must be {_JSON}")


def _refuse_codings(request: Request) -> None:
    """Refuses a body that is compressed: its length says nothing of what it becomes."""
    for name, wanted in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        given = header(request, name).lower()
        if given not in ("", wanted):
            said = name.replace("-", " ")
            message = f"the {said} is {given[:60]}; it must be {wanted}: send the body without compression"
            raise HttpError(415, message, headers={"accept-encoding": "identity"})


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise HttpError(413, f"the body has {size:,} bytes; the limit is {limit:,}", code="request_too_large")


def values(request: Request) -> dict[str, object]:
    """Returns the JSON object in the body, which was read. Raises HttpError."""
    body, request.state.body = request.state.body, b""
    try:
        value: Any = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise HttpError(400, "the body is not valid: it is nested too deeply") from None
    except ValueError as error:
        # Also a number with more digits than Python converts, and text that is not UTF-8.
        raise HttpError(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body is not a JSON object")
    return cast(dict[str, object], value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class EventStream:
    __slots__ = ("_is_over", "_is_writing", "_quiet_ticks", "_send")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_writing = self._is_over = False
        # Ticks of silence. The one that follows an event does not count.
        self._quiet_ticks = 0

    async def open(self, headers: Mapping[str, str]) -> None:
        """Sends the headers, with those of all streams."""
        lines = [(name.encode(), value.encode()) for name, value in (_HEADERS | {**headers}).items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": lines})

    async def write(self, data: bytes) -> None:
        """Sends events. Waits while the reader is slow."""
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False
        self._quiet_ticks = -1

    async def close(self, data: bytes) -> None:
        self._is_over = True
        await self._send({"type": "http.response.body", "body": data})

    async def ping(self) -> None:
        """Sends a ping, unless the stream has ended since it was due."""
        if not self._is_over:
            await self.write(PING)

    async def keep_alive(self, ping_seconds: float) -> NoReturn:
        """Sends a ping after each such time of silence. Its clock costs an event nothing."""
        while True:
            await asyncio.sleep(ping_seconds / _TICKS_PER_PING)
            if not self._is_writing:
                self._quiet_ticks += 1
            if self._quiet_ticks >= _TICKS_PER_PING:
                self._quiet_ticks = 0
                await self.ping()
