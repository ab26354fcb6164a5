"""Bounds that uvicorn lacks: the time and the size of a request's headers, a body that is read when it is wanted, and
the time that a client may take nothing of what waits for it.

Owns a class for each of uvicorn's HTTP parsers; both keep the state of a request in `cycle`.
"""

import asyncio
import contextlib
from collections import deque
from typing import Any, cast

from tandem_client.gateway.accepting import SEAT, Seat, Seats
from tandem_client.gateway.cors import early_headers
from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.exchange import MAX_HEADER_BYTES
from tandem_client.gateway.settings import Settings

# Requests of one connection that wait for the one in work. Hardly any client sends the next before the answer.
MAX_QUEUED = 16
# As the help of --ping-seconds says. A reader that takes nothing holds a request of the service in vain.
_PINGS_TO_STALL = 4
# How often the unread bytes of a connection are looked at in that time.
_LOOKS_TO_STALL = 12
_OF_UPGRADE = (b"upgrade", b"http2-settings")
_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedConnection:
    """One connection; the parser's class comes after it in the order of bases. Its `app_state` has its seat."""

    seats: Seats
    settings: Settings
    transport: Any
    flow: Any
    cycle: Any
    config: Any
    app_state: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for the first request."""
        cast(Any, super()).connection_made(transport)
        self._seat: Seat = self.app_state[SEAT]
        self._seat.end = transport.abort
        self._head_bytes = self._num_unsent = self._num_stalled_looks = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._wait_for_head(self._seat.due_at)
        self._wait_to_look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.seats.leave(self._seat)
        self._look_timer.cancel()
        self._head_is_here()
        cast(Any, super()).connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes. Those of headers are counted, and their time is limited."""
        if self.transport.is_closing():
            return
        in_head = not self._is_in_work()
        cast(Any, super()).data_received(data)
        if self._is_in_work():
            self._head_is_here()
            if in_head and self.cycle.more_body:
                # Until the application asks for the body.
                self.flow.pause_reading()
        elif in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._end(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            elif self._head_timer is None:
                self._wait_for_head()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request: a caller that is not known has as long as for the first one."""
        is_stranger = self.seats.is_stranger(self._seat)
        self.timeout_keep_alive = self.settings.head_seconds if is_stranger else self.config.timeout_keep_alive
        cast(Any, super()).on_response_complete()

    def _wait_to_look(self) -> None:
        seconds = _PINGS_TO_STALL * self.settings.ping_seconds / _LOOKS_TO_STALL
        self._look_timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Ends the connection if its client has taken nothing of what waits for it for too long.

        It would otherwise stay, also after `close`, which waits until everything is sent. The request in work ends too.
        """
        num_unsent = self.transport.get_write_buffer_size()
        is_waiting = num_unsent or self.transport.is_closing()
        is_stalled = is_waiting and num_unsent == self._num_unsent
        self._num_unsent = num_unsent
        self._num_stalled_looks = self._num_stalled_looks + 1 if is_stalled else 0
        if self._num_stalled_looks >= _LOOKS_TO_STALL:
            self.transport.abort()
        else:
            self._wait_to_look()

    def _is_in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self, due_at: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_at(due_at or loop.time() + self.settings.head_seconds, self._is_late)

    def _head_is_here(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_late(self) -> None:
        self._head_timer = None
        if not self._is_in_work():
            self._end(408, f"the headers were not complete after {self.settings.head_seconds:g} s")

    def _end(self, status: int, message: str) -> None:
        """Answers in one piece and closes the connection."""
        if self.transport.is_closing():
            return
        body = HttpError(status, message, code="connection").body()
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": str(len(body)),
            **early_headers(self.settings.origins, self._early_origin()),
        }
        lines = [f"HTTP/1.1 {status} {_PHRASES[status]}", *(f"{name}: {value}" for name, value in headers.items())]
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)
        self.transport.close()

    def _early_origin(self) -> str:
        """The origin in the part of a head that has come; empty without one, and with h11, which shows only a whole."""
        return ""


class _UntilClose(int):
    """The length of an answer that ends with its connection: uvicorn subtracts what it sends and wants 0 at the end."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> "_UntilClose":
        return self


class _Parser:
    """httptools' parser, which stops behind a head with `Upgrade` and takes the body that follows for other bytes.

    Java's client sends that header with its first request. A server may ignore it, so such a head is parsed once more,
    without it.
    """

    def __init__(self, parser: Any, protocol: "EagerConnection") -> None:
        import httptools

        self._parser, self._protocol, self._stop = parser, protocol, httptools.HttpParserUpgrade

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parses bytes. Raises an error of httptools."""
        while True:
            try:
                self._parser.feed_data(data)
            except self._stop as stopped:
                if not self._protocol.ignores_upgrade():
                    raise
                if len(self._protocol.pipeline) > MAX_QUEUED:
                    return
                data = self._protocol.head_without_upgrade() + data[stopped.args[0] :]
                self._parser = type(self._parser)(self._protocol)
                with contextlib.suppress(AttributeError):
                    # As uvicorn does; older versions of httptools need it not.
                    self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return


class EagerConnection(BoundedConnection):
    """One connection of httptools, which parses all that comes: heads of later requests while one is in work too.

    uvicorn keeps the requests it has parsed, and httptools the line that is not complete, both without bounds.
    """

    pipeline: Any
    parser: Any
    url: bytes
    # The headers of the head that comes; None before the first.
    headers: list[tuple[bytes, bytes]] | None

    def connection_made(self, transport: asyncio.Transport) -> None:
        # Since the last complete head, or part of a body.
        self._num_unread = 0
        # The requests that are not answered, in order.
        self._unanswered = deque[Any]()
        self.parser = _Parser(self.parser, self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Informs the request in work; uvicorn informs only the last one that came."""
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes. Closes a connection that has more than its bounds beside the request in work."""
        self._num_unread += len(data)
        super().data_received(data)
        if self._num_unread > MAX_HEADER_BYTES or len(self.pipeline) > MAX_QUEUED:
            # An answer may be half sent, so nothing says why. Unlike `abort`, it lets a write that is due pass.
            self.transport.close()

    def on_headers_complete(self) -> None:
        if self.ignores_upgrade():
            return
        self._num_unread = 0
        cast(Any, super()).on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            # uvicorn would send an answer without a length in chunks, which came with HTTP/1.1.
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilClose()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)
        # What comes behind the body is not a header of the request.
        self.headers = list[tuple[bytes, bytes]]()

    def on_body(self, body: bytes) -> None:
        """Part of a body. uvicorn bounds those."""
        self._num_unread = 0
        cast(Any, super()).on_body(body)

    def on_message_complete(self) -> None:
        if not self.ignores_upgrade():
            self._num_unread = 0
            cast(Any, super()).on_message_complete()

    def ignores_upgrade(self) -> bool:
        """Whether the request in the parser is parsed once more without its wish for another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_upgrade(self) -> bytes:
        """The head of the request, which was parsed, without the wish for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers or ():
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _OF_UPGRADE)
            if name not in _OF_UPGRADE:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"\r\n"])

    def _early_origin(self) -> str:
        origins = [value for name, value in self.headers or () if name == b"origin"]
        return origins[0].decode("latin-1") if len(origins) == 1 else ""


def bounded(parser: type[Any], seats: Seats, settings: Settings) -> type[Any]:
    """Returns uvicorn's protocol class of a parser, with the bounds. h11 parses one request after the other."""
    connection = EagerConnection if hasattr(parser, "on_headers_complete") else BoundedConnection
    return type("Bounded", (connection, parser), {"seats": seats, "settings": settings})
