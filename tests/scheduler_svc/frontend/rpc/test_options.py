"""What gRPC makes of the server's options for connections, seen from a plain socket."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import grpc
import pytest

from scheduler_svc.frontend.rpc import options
from tests.rigs.raw_http2 import GOAWAY, PING, RawConnection

# gRPC's server forgives the first two pings that come too soon.
NUM_PINGS = 8


@contextmanager
def connected() -> Iterator[RawConnection]:
    settings = options.server_options(max_message_bytes=1024, share_port=False, max_connections=8)
    server = grpc.server(ThreadPoolExecutor(1), options=settings)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with closing(RawConnection(f"127.0.0.1:{port}")) as connection:
        yield connection
    server.stop(None).wait()


def answers(connection: RawConnection) -> list[int]:
    """The kinds of the frames that answer the pings, each sent after the answer to the last one."""
    kinds: list[int] = []
    connection.ping()
    for frame in connection.frames():
        if frame.kind in (PING, GOAWAY):
            kinds.append(frame.kind)
            if len(kinds) == NUM_PINGS or frame.kind == GOAWAY:
                break
            connection.ping()
    return kinds


@pytest.mark.parametrize("interval_ms", [0, 3_600_000])
def test_a_caller_without_calls_may_ping_at_the_interval_and_no_sooner(
    monkeypatch: pytest.MonkeyPatch, interval_ms: int
) -> None:
    monkeypatch.setattr(options, "MIN_PING_INTERVAL_MS", interval_ms)
    with connected() as connection:
        found = answers(connection)
    assert found[-1] == GOAWAY if interval_ms else found == [PING] * NUM_PINGS


def test_a_caller_that_answers_no_ping_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "KEEPALIVE_MS", 100)
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_MS", 100)
    with connected() as connection:
        pinged = [frame.kind for frame in connection.frames(answering=False) if frame.kind == PING]
        assert pinged, "the connection was closed without a ping"
