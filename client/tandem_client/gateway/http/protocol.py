"""Bounds that uvicorn lacks: the time and the size of a request's headers, the number of connections, unread answers.

Owns a class for each of uvicorn's HTTP parsers; both keep the state of a request in `cycle`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.http.exchange import MAX_HEADER_BYTES
from tandem_client.gateway.metrics import Meter

# Requests of one connection that wait for the one in work. Hardly any client sends the next before the answer.
MAX_QUEUED = 16
# How often the unread bytes of a connection are looked at in the time that its client may take none.
_LOOKS_TO_STALL = 12
_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class Bounds:
    """The bounds of one process, and its connections."""

    def __init__(self, meter: Meter, *, max_connections: int, head_seconds: float, stall_seconds: float) -> None:
        self._meter = meter
        self._max_connections = max_connections
        self.head_seconds = head_seconds
        self._look_seconds = stall_seconds / _LOOKS_TO_STALL
        self._connections: dict[BoundedConnection, None] = {}

    def enter(self, connection: "BoundedConnection") -> bool:
        """Counts a connection. Returns False if there are too many."""
        self._connections[connection] = None
        self._meter.add("connections")
        if len(self._connections) <= self._max_connections:
            return True
        self._meter.add("connections_refused")
        return False

    def leave(self, connection: "BoundedConnection") -> None:
        """Counts the end of a connection."""
        del self._connections[connection]
        self._meter.add("connections", -1)

    async def run(self) -> None:
        """Ends connections whose clients take nothing, for ever."""
        while True:
            await asyncio.sleep(self._look_seconds)
            for connection in list(self._connections):
                connection.look()


class BoundedConnection:
    """One connection; the parser's class comes after it in the order of bases."""

    bounds: Bounds
    transport: Any
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Counts the connection; closes it if there are too many."""
        parent: Any = super()
        parent.connection_made(transport)
        self._head_bytes = self._num_unsent = self._num_stalled_looks = 0
        self._head_timer: asyncio.TimerHandle | None = None
        if self.bounds.enter(self):
            self._wait_for_head()
        else:
            self._end(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts the end."""
        self.bounds.leave(self)
        self._head_is_here()
        parent: Any = super()
        parent.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes. Those of headers are counted, and their time is limited."""
        if self.transport.is_closing():
            return
        in_head = not self._is_in_work()
        parent: Any = super()
        parent.data_received(data)
        if self._is_in_work():
            self._head_is_here()
        elif in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._end(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            elif self._head_timer is None:
                self._wait_for_head()

    def look(self) -> None:
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

    def _is_in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(self.bounds.head_seconds, self._is_late)

    def _head_is_here(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_late(self) -> None:
        self._head_timer = None
        if not self._is_in_work():
            self._end(408, f"the headers were not complete after {self.bounds.head_seconds:g} s")

    def _end(self, status: int, message: str) -> None:
        """Answers in one piece and closes the connection."""
        if self.transport.is_closing():
            return
        body = HttpError(status, message, code="connection").body()
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class EagerConnection(BoundedConnection):
    """One connection of httptools, which parses all that comes: heads of later requests while one is in work too.

    uvicorn keeps the requests it has parsed, and httptools the line that is not complete, both without bounds.
    """

    pipeline: Any

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to count."""
        # Since the last complete head, or part of a body.
        self._num_unread = 0
        # The requests that are not answered, in order.
        self._unanswered = deque[Any]()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request in work; uvicorn tells only the last one that came."""
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
        """A head is complete."""
        self._read("on_headers_complete")
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Part of a body. uvicorn bounds those."""
        self._read("on_body", body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._read("on_message_complete")

    def _read(self, callback: str, *arguments: bytes) -> None:
        self._num_unread = 0
        getattr(super(), callback)(*arguments)


def bounded(parser: type[Any], bounds: Bounds) -> type[Any]:
    """Returns uvicorn's protocol class of a parser, with the bounds. h11 parses one request after the other."""
    connection = EagerConnection if hasattr(parser, "on_headers_complete") else BoundedConnection
    return type("Bounded", (connection, parser), {"bounds": bounds})


def parser_class(find: Callable[[str], Any]) -> type[Any]:
    """The faster of uvicorn's parsers that is installed. `find` tells whether a module is."""
    if find("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        return HttpToolsProtocol
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return H11Protocol
