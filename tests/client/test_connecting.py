"""How long the client waits for a connection, and which error a failed connection raises."""

import asyncio
from typing import Any

import grpc
import pytest

from tandem_client import AsyncClient, Client, connection, errors
from tandem_client.wire.rpc_errors import ErrorReader
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService
from tests.client.listeners import Proxy, silent_listener
from tests.rigs.processes import free_address

# The delay of the first byte of HTTP/2, far above the pause before a second attempt.
DELAY_SECONDS = 0.5


@either
def test_a_service_that_answers_late_is_reached(service: FakeService, connect: Connect) -> None:
    with Proxy(service.address, delay_seconds=DELAY_SECONDS) as proxy, connect(proxy.address, max_retries=0) as client:
        assert [delta.text for delta in client.generate("hi")] == ["Ré", "turn"]


def test_a_dead_connection_is_noticed_and_a_new_one_tried_within_20_seconds() -> None:
    options = dict(connection.channel_options("there:1", proxy=True))
    noticed = options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"]
    assert noticed + options["grpc.min_reconnect_backoff_ms"] + options["grpc.max_reconnect_backoff_ms"] <= 20_000
    assert (options["grpc.initial_reconnect_backoff_ms"], options["grpc.max_reconnect_backoff_ms"]) == (100, 1_000)


@pytest.mark.parametrize("timeout", [None, 0.2])
def test_a_call_to_a_listener_that_never_answers_fails(monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
    """The error names the connection if its limit comes first, else the caller's timeout."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_MS", 300 if timeout is None else 600_000)
    kind = errors.AnswersTooSlowly if timeout is None else errors.DeadlineExceeded

    async def call(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.load(timeout=timeout)

    with silent_listener() as address:
        with pytest.raises(kind, match=f"^{address} answers too slowly: ") as caught:
            asyncio.run(call(address))
        assert not caught.value.stream_began
        with Client(address) as client, pytest.raises(kind, match=f"^{address} answers too slowly: "):
            list(client.generate("hi", timeout=timeout))
        expected = f"^{address} is not ready after 0.1 s: it has not answered"
        with Client(address) as client, pytest.raises(errors.DeadlineExceeded, match=expected):
            client.wait_ready(0.1)


@either
def test_calling_an_address_without_a_listener_raises_nothing_answers(connect: Connect) -> None:
    address = free_address()
    expected = f"^nothing answers at {address}: Connection refused$"
    with connect(address) as client:
        with pytest.raises(errors.NothingAnswers, match=expected) as caught:
            client.load()
        assert (caught.value.code, caught.value.retry_after_seconds) == (grpc.StatusCode.UNAVAILABLE, None)
        with pytest.raises(errors.NothingAnswers, match=expected):
            list(client.generate("hi"))
        with pytest.raises(errors.DeadlineExceeded, match=r"not ready after 0\.1 s: nothing answers"):
            client.wait_ready(0.1)


class GrpcError(grpc.RpcError):
    """An error as gRPC's library makes it; without metadata it has no details of the service."""

    def __init__(self, code: grpc.StatusCode, said: str, metadata: Any = None) -> None:
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: said, lambda: metadata
        self.initial_metadata = tuple


ALL = "failed to connect to all addresses"
REFUSED = f"{ALL}; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
MISSING = "[field:hostname lookup error:address lookup failed for a:1: Domain name not found]"
PARSING = "Failed parsing HTTP/2 (Trying to connect an http1.x server (HTTP status 400))"
HANDSHAKE = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: WRONG_VERSION_NUMBER: OK"
ANOTHER = "a:1 speaks HTTP/1.1 and no gRPC: it may be the HTTP gateway; the service itself has another port"
PINGS = "GOAWAY received; Error code: 11; Debug Text: too_many_pings"
TEXTS = [
    (f"{REFUSED}Connection timed out", errors.AnswersTooSlowly, "a:1 answers too slowly: Connection timed out"),
    (f"{REFUSED}No route to host", errors.NothingAnswers, "nothing answers at a:1: No route to host"),
    (f"errors resolving a:1: {MISSING}", errors.NothingAnswers, "nothing answers at a:1: Domain name not found"),
    (f"{REFUSED}{PARSING}", errors.OtherProtocol, ANOTHER),
    (ALL, errors.NothingAnswers, "nothing answers at a:1"),
    (f"{REFUSED}{HANDSHAKE}", errors.OtherProtocol, "a:1 takes the connection and ends it: OK"),
    (f"{REFUSED}Socket closed", errors.OtherProtocol, "a:1 takes the connection and ends it: Socket closed"),
    *(
        (text, errors.Unavailable, f"a:1 closed the connection: {text}")
        for text in (
            "Socket closed",
            "recvmsg:Connection reset by peer",
            "sendmsg: Broken pipe",
            "GOAWAY received; Error code: 2; Debug Text: Cancelling all calls",
            "Stream removed",
            "EOF",
        )
    ),
    ("keepalive timeout", errors.Unavailable, "a:1 does not answer any more: keepalive timeout"),
    (PINGS, errors.Unavailable, f"a:1 closed the connection because of its pings: {PINGS}"),
    ("ping timeout", errors.Unavailable, "a:1 does not answer any more: ping timeout"),
]


@pytest.mark.parametrize(("said", "kind", "message"), TEXTS)
def test_each_grpc_error_text_raises_its_error_class(said: str, kind: type[errors.TandemError], message: str) -> None:
    error = ErrorReader(address="a:1", timeout=None).read(GrpcError(grpc.StatusCode.UNAVAILABLE, said))
    assert (type(error), str(error)) == (kind, message)


LOST, NO_STATUS = "a:1 lost the connection to the service: {}", "a:1 ended the call without a status: {}"
RESET = "Received RST_STREAM with error code"
OF_OTHER_STATUSES = [
    (grpc.StatusCode.INTERNAL, f"{RESET} 2", errors.Unavailable, LOST),
    (grpc.StatusCode.INTERNAL, f"Stream removed (RST_STREAM ({RESET} 8))", errors.Unavailable, NO_STATUS),
    (grpc.StatusCode.UNKNOWN, "Stream removed", errors.Unavailable, NO_STATUS),
    (grpc.StatusCode.CANCELLED, "Channel closed!", errors.ClientClosed, "the client was closed during the call"),
    (grpc.StatusCode.CANCELLED, "CANCELLED", errors.Cancelled, "CANCELLED"),
]


@pytest.mark.parametrize(("code", "said", "kind", "message"), OF_OTHER_STATUSES)
def test_a_status_that_the_library_made_for_a_broken_call_is_told_in_words(
    code: grpc.StatusCode, said: str, kind: type[errors.TandemError], message: str
) -> None:
    error = ErrorReader(address="a:1", timeout=None).read(GrpcError(code, said))
    assert (type(error), str(error), error.code) == (kind, message.format(said), code)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE])
def test_a_stream_that_is_removed_at_its_deadline_is_late(code: grpc.StatusCode) -> None:
    """The service counts the time too, and ends the stream; that may come before the client's own status."""
    reader, removed = ErrorReader(address="a:1", timeout=2.0), GrpcError(code, "Stream removed")
    why = "; it was waiting: no worker is here"
    error = reader.read(removed, stream_began=True, is_late=True, why_late=why)
    assert type(error) is errors.DeadlineExceeded
    assert str(error) == f"the stream did not end within 2 s{why}"
    assert str(reader.read(removed, is_late=True)) == "a:1 answers too slowly: no answer within 2 s"
    assert type(reader.read(removed)) is errors.Unavailable
    refused = GrpcError(grpc.StatusCode.UNAVAILABLE, "no worker")
    assert str(reader.read(refused, is_late=True)) == "no worker"
