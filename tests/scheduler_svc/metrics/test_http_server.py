"""The HTTP server of the metrics page on real sockets: its answers, and each of its bounds."""

import asyncio
import contextlib
import errno
import gc
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import pytest

from scheduler_svc.metrics.http_server import HttpLimits, HttpServer
from tests.rigs.waiting import TIMEOUT_SECONDS, until

PAGE = b"tandem_workers 1.0\n" * 10


class Served:
    """A server, and raw connections to it."""

    def __init__(self, listener: socket.socket, server: HttpServer) -> None:
        self.address = listener.getsockname()
        self.server = server

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, TIMEOUT_SECONDS)

    def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends a request as it is. Returns status, headers and body."""
        with self.connect() as connection:
            connection.sendall(request)
            return parsed(read_all(connection))


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(65_536):
        data += chunk
    return data


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split(" ")[1]), headers, body


def get(target: str = "/metrics", method: str = "GET", more: str = "") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: here\r\n{more}\r\n".encode()


Serve = Callable[..., Served]


def nobody_is_refused(authorizations: Sequence[bytes], certificate: dict[str, Any] | None) -> None:
    return None


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[HttpServer] = []

    def start(
        refuse: Any = nobody_is_refused, context: Callable[[], ssl.SSLContext] | None = None, **limits: Any
    ) -> Served:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(
            [listener], lambda: PAGE, content_type="text/x", refuse=refuse, context=context, limits=HttpLimits(**limits)
        )
        server.start()
        running.append(server)
        return Served(listener, server)

    yield start
    for server in running:
        server.stop()


def test_the_page_is_served_to_get_and_head_alone(serve: Serve) -> None:
    served = serve(per_second=1000)
    status, headers, body = served.ask(get())
    assert (status, body, headers["content-type"], headers["connection"]) == (200, PAGE, "text/x", "close")
    assert served.ask(get("/metrics?name=x"))[0] == 200
    status, headers, body = served.ask(get(method="HEAD"))
    assert (status, body, headers["content-length"]) == (200, b"", str(len(PAGE)))
    for target in ("/", "/metrics/", "/metric", "/metrics%00", "http://here/metrics", "*"):
        assert served.ask(get(target))[0] == 404, target
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
        status, headers, _ = served.ask(get(method=method))
        assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_refused_callers_learn_nothing_else(serve: Serve) -> None:
    seen: list[list[bytes]] = []

    def refuse(authorizations: Sequence[bytes], certificate: dict[str, Any] | None) -> HTTPStatus | None:
        seen.append(list(authorizations))
        assert certificate is None
        return HTTPStatus.UNAUTHORIZED if len(seen) < 3 else HTTPStatus.FORBIDDEN

    served = serve(refuse, per_second=1000)
    for target in ("/metrics", "/elsewhere"):
        status, headers, body = served.ask(get(target, more="Authorization: Bearer a\r\nauthorization: b\r\n"))
        assert (status, headers["www-authenticate"], body) == (401, "Bearer", b"401 Unauthorized\n")
    assert served.ask(get())[0] == 403
    assert seen == [[b"Bearer a", b"b"], [b"Bearer a", b"b"], []]


OVERSIZED = {
    "header": get(more="X: " + "x" * 9000 + "\r\n"),
    "line": get("/metrics?" + "x" * 9000),
    "headers": get(more="".join(f"X-{number}: {number}\r\n" for number in range(2000))),
    "bytes": b"x" * 100_000,
}
NO_REQUESTS = {
    "zeros": b"\0" * 64 + b"\r\n\r\n",
    "no version": b"GET /metrics\r\n\r\n",
    "no host": b"GET /metrics HTTP/1.1\r\n\r\n",
    "no header": get(more="bad header\r\n"),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", [*OVERSIZED, *NO_REQUESTS])
def test_oversized_requests_and_what_is_none_are_refused(serve: Serve, name: str) -> None:
    served = serve(per_second=1000)
    status, _, body = served.ask((OVERSIZED | NO_REQUESTS)[name])
    assert status in ((400, 431) if name in OVERSIZED else range(400, 506)) and PAGE not in body
    assert served.ask(get())[0] == 200


def test_a_slow_request_is_cut_off(serve: Serve) -> None:
    served = serve(seconds=0.3, per_second=1000)

    def send_slowly(connection: socket.socket) -> None:
        """Each piece comes in time; all of them, which take more than 60 s, do not."""
        for byte in get(more="X: 1\r\n" * 1000):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    with served.connect() as connection, pytest.raises(ConnectionError):
        send_slowly(connection)
    with served.connect() as connection:
        assert read_all(connection) == b""


def test_a_caller_that_reads_nothing_is_cut_off(serve: Serve) -> None:
    served = serve(seconds=0.5, per_second=1000)
    served.server.page = lambda: bytes(16 << 20)
    with served.connect() as connection:
        connection.sendall(get())
        # The server has begun to write, and then it has given up.
        until(lambda: served.server._connections)
        until(lambda: not served.server._connections)
        received = 0
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65_536):
                received += len(chunk)
        assert received < 16 << 20


def test_new_connections_take_the_places_of_old_ones(serve: Serve) -> None:
    served = serve(max_connections=4, per_second=1000)
    silent = [served.connect() for _ in range(20)]
    assert served.ask(get())[0] == 200
    ended = 0
    for connection in silent:
        connection.settimeout(0.2)
        try:
            ended += connection.recv(1) == b""
        except ConnectionError:
            ended += 1
        except TimeoutError:
            pass
        connection.close()
    assert ended >= 16


def test_connections_are_served_at_a_bounded_rate(serve: Serve) -> None:
    served = serve(per_second=20)
    begun = time.monotonic()
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(served.ask(get())[0])) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 10
    assert time.monotonic() - begun >= 8 / 20


def test_a_caller_that_leaves_changes_nothing(serve: Serve) -> None:
    served = serve(per_second=1000)
    for part in (b"", b"GET /met", get()):
        with served.connect() as connection:
            # Closing then sends a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(part)
    assert served.ask(get())[0] == 200


def test_stop_closes_connections_that_it_accepts_meanwhile() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(100):
            listener = socket.create_server(("127.0.0.1", 0))
            server = HttpServer([listener], lambda: PAGE, content_type="x", refuse=nobody_is_refused, context=None)
            server.start()
            with socket.create_connection(listener.getsockname()):
                server.stop()
        gc.collect()
    assert not [str(warning.message) for warning in seen]


def test_stop_ends_open_connections(serve: Serve) -> None:
    served = serve()
    with served.connect() as connection:
        connection.sendall(b"GET")
        until(lambda: served.server._connections)
        served.server.stop()
        assert connection.recv(1) == b""
    with pytest.raises(OSError):
        served.connect()


def test_a_page_that_cannot_start_does_not_hold_the_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No file descriptor may be left for its event loop."""

    def fails(coroutine: Any) -> None:
        coroutine.close()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "run", fails)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer([listener], lambda: PAGE, content_type="x", refuse=nobody_is_refused, context=None)
        server.start()
        server.stop()
    assert caplog.messages == ["the metrics page has ended"]
