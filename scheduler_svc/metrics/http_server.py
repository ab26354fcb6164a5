"""Owns the HTTP server of the page: a thread, its connections, and every bound on them. Knows no metric.

`GET` and `HEAD` of `/metrics`, one request per connection. h11 parses requests. A connection has `seconds` in all, a
request `max_header_bytes`. The page is a little work for this process, so that connections that come faster than
`per_second` wait in the kernel's queue, and hostile callers cost the core's thread a few per cent of its time at most.
If all places are taken, the oldest connection ends: an answer takes milliseconds.
"""

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import h11

from tandem_contract.plural import numbered

log = logging.getLogger("tandem.core")

_PATH = b"/metrics"
_METHODS = (b"GET", b"HEAD")
_CHUNK_BYTES = 4096
# What a caller may still send after its answer before the connection ends, so that it can read the answer.
_REST_BYTES, _REST_SECONDS = 65_536, 0.5
_STOP_SECONDS = 2.0

# Takes the values of the Authorization headers and the client's certificate; returns the refusal, if there is one.
Refuse = Callable[[Sequence[bytes], dict[str, Any] | None], HTTPStatus | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    max_connections: int = 32
    per_second: int = 50
    # The life of a connection, from its acceptance to its end; a TLS handshake.
    seconds: float = 10.0
    handshake_seconds: float = 5.0
    # The request line and all headers.
    max_header_bytes: int = 8192


@dataclass(slots=True, eq=False, repr=False)
class HttpServer:
    """Serves in a thread, from `start` to `stop`."""

    # They listen; the server closes them.
    sockets: Sequence[socket.socket]
    page: Callable[[], bytes]
    _: KW_ONLY
    content_type: str
    refuse: Refuse
    # Returns the TLS context of a new connection.
    context: Callable[[], ssl.SSLContext] | None
    limits: HttpLimits = HttpLimits()
    # Oldest first.
    _connections: dict[asyncio.Task[None], None] = field(default_factory=dict["asyncio.Task[None]", None], init=False)
    _main: asyncio.Task[None] | None = field(default=None, init=False)
    _is_running: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts the thread and waits until it accepts connections."""
        for one in self.sockets:
            one.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()
        self._is_running.wait()

    def stop(self) -> None:
        """Ends all connections and closes the sockets. A second call does nothing."""
        if self._thread is not None and self._main is not None:
            # It has ended already if it failed.
            with suppress(RuntimeError):
                self._main.get_loop().call_soon_threadsafe(self._main.cancel)
            self._thread.join(_STOP_SECONDS)
        for one in self.sockets:
            one.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            return
        except Exception:
            log.exception("the metrics page has ended")
        finally:
            # `start` waits for it, also if nothing could be started.
            self._is_running.set()

    async def _serve(self) -> None:
        loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        # Errors of connections; an operator cannot act on them, and a flood of them would fill the log.
        loop.set_exception_handler(lambda loop, context: None)
        self._is_running.set()
        try:
            await asyncio.gather(*(self._accept(one) for one in self.sockets))
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pause = len(self.sockets) / self.limits.per_second
        while True:
            next_at = loop.time() + pause
            await self._readable(listener)
            try:
                # Not `sock_accept`: if its task is cancelled after the connection was accepted, it leaves it open.
                connection, _ = listener.accept()
            except OSError:
                # No descriptor is left, or the caller is gone.
                await asyncio.sleep(pause)
                continue
            connection.setblocking(False)
            if len(self._connections) >= self.limits.max_connections:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._serve_connection(connection))
            self._connections[task] = None
            task.add_done_callback(partial(self._ended, connection))
            await asyncio.sleep(next_at - loop.time())

    async def _readable(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(listener, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(listener)

    def _ended(self, connection: socket.socket, task: "asyncio.Task[None]") -> None:
        # Here, because a task that is cancelled before its first step runs no `finally`.
        connection.close()
        self._connections.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection to the metrics page failed", exc_info=error)

    async def _serve_connection(self, connection: socket.socket) -> None:
        transport: asyncio.WriteTransport | None = None
        try:
            async with asyncio.timeout(self.limits.seconds):
                reader, writer = await self._open(connection)
                transport = writer.transport
                await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError):
            # The caller is gone or too slow, or its handshake failed.
            pass
        finally:
            if transport is not None:
                transport.abort()

    async def _open(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=self.limits.max_header_bytes)
        protocol = asyncio.StreamReaderProtocol(reader)
        options: dict[str, Any] = {}
        if self.context is not None:
            options = {"ssl": self.context(), "ssl_handshake_timeout": self.limits.handshake_seconds}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, **options)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.max_header_bytes)
        try:
            request = await self._request(parser, reader)
        except h11.RemoteProtocolError as error:
            status, request = HTTPStatus(error.error_status_hint), None
        else:
            if request is None:
                return
            status = self._status(request, writer)
        body = self.page() if status is HTTPStatus.OK else f"{status.value} {status.phrase}\n".encode()
        writer.write(self._head(parser, status, len(body)))
        if request is None or request.method != b"HEAD":
            writer.write(body)
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()
        await _skip_rest(reader)

    async def _request(self, parser: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
        """Returns the request's line and headers, None if the caller sends none. Raises h11.RemoteProtocolError."""
        limit = num_left = self.limits.max_header_bytes
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            data = await reader.read(_CHUNK_BYTES)
            num_left -= len(data)
            if num_left < 0:
                raise h11.RemoteProtocolError(
                    f"the request has more than {numbered(limit, 'byte')}", error_status_hint=431
                )
            parser.receive_data(data)

    def _status(self, request: h11.Request, writer: asyncio.StreamWriter) -> HTTPStatus:
        authorizations = [value for name, value in request.headers if name == b"authorization"]
        tls = writer.get_extra_info("ssl_object")
        if (refused := self.refuse(authorizations, tls.getpeercert() if tls is not None else None)) is not None:
            return refused
        if request.target.partition(b"?")[0] != _PATH:
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.OK if request.method in _METHODS else HTTPStatus.METHOD_NOT_ALLOWED

    def _head(self, parser: h11.Connection, status: HTTPStatus, num_bytes: int) -> bytes:
        headers = {
            "Content-Type": self.content_type if status is HTTPStatus.OK else "text/plain; charset=utf-8",
            "Content-Length": str(num_bytes),
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        if status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        response = h11.Response(status_code=status, reason=status.phrase, headers=list(headers.items()))
        return parser.send(response) or b""


async def _skip_rest(reader: asyncio.StreamReader) -> None:
    """Reads what the caller still sends, because an unread rest would end the connection before it reads the answer."""
    num_left = _REST_BYTES
    try:
        async with asyncio.timeout(_REST_SECONDS):
            while num_left > 0 and (data := await reader.read(_CHUNK_BYTES)):
                num_left -= len(data)
    except TimeoutError:
        return
