"""Tokens and TLS of the client: what is sent, what is refused before it is sent, and the exceptions."""

from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tandem_client import AsyncClient, Client, TlsSettings, errors
from tests.client.both import Connect, either
from tests.rigs.authorities import Authority
from tests.rigs.waiting import TIMEOUT_SECONDS

TOKEN = "tandem_abc"


class Door(grpc.GenericRpcHandler):
    """Answers every call with the same code, and keeps the metadata of the calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str | bytes]]] = []
        self.code = grpc.StatusCode.OK

    def service(self, handler_call_details: Any) -> Any:
        metadata = {pair[0]: pair[1] for pair in handler_call_details.invocation_metadata}
        self.seen.append((handler_call_details.method, metadata))

        def answer(requests: Any, context: grpc.ServicerContext) -> Any:
            if self.code != grpc.StatusCode.OK:
                context.abort(self.code, "no")
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.fixture
def door() -> Any:
    return Door()


@pytest.fixture
def serve(door: Door) -> Any:
    servers: list[grpc.Server] = []

    def start(credentials: grpc.ServerCredentials | None = None) -> str:
        server, address = grpc.server(futures.ThreadPoolExecutor(4), handlers=[door]), "127.0.0.1:0"
        servers.append(server)
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0)


@either
def test_every_call_has_the_token(door: Door, serve: Callable[..., str], connect: Connect) -> None:
    with connect(serve(), token=TOKEN) as client:
        client.wait_ready(TIMEOUT_SECONDS)
        calls: list[Callable[[], object]] = [
            client.health, client.load, client.model_info, client.flush_cache, client.quarantine,
            client.clear_quarantine, lambda: client.abort("a"), lambda: client.tokenize("a"),
            lambda: client.detokenize([1]), lambda: list(client.generate("a", resume=True)),
        ]  # fmt: skip
        door.code = grpc.StatusCode.PERMISSION_DENIED
        for call in calls:
            with pytest.raises(errors.PermissionDenied, match="no"):
                call()
        door.code = grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(errors.Unauthenticated) as caught:
            client.load()
    assert len({method for method, _ in door.seen}) == 11
    assert all(metadata.get("authorization") == f"Bearer {TOKEN}" for _, metadata in door.seen)
    assert TOKEN not in repr(client) + str(caught.value) + repr(client._access)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_is_not_sent_in_plaintext_to_another_machine(kind: Any) -> None:
    for address in ("192.0.2.1:50051", "example.org:1", "dns:///127.0.0.1:1", "127.evil.example:1"):
        with pytest.raises(ValueError, match=r"would be sent to .* without encryption") as caught:
            kind(address, token=TOKEN)
        assert TOKEN not in str(caught.value)
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/x"):
        kind(address, token=TOKEN)


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "ä", " a"])
def test_a_token_that_is_no_header_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="token must be printable ASCII without blanks"):
        Client(token=token)


def test_half_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tls.key is missing"):
        Client(tls=TlsSettings(cert=tmp_path / "c.pem"))
    with pytest.raises(FileNotFoundError):
        Client(tls=TlsSettings(ca=tmp_path / "ca.pem"))


def test_a_service_is_known_by_its_authority_and_name(door: Door, serve: Callable[..., str], tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = authority.issue("service", "DNS:tandem.example")
    address = serve(pair.of_server())
    good = TlsSettings(ca=authority.certificate, server_name="tandem.example")
    with Client(address, token=TOKEN, tls=good) as client:
        assert client.health(timeout=TIMEOUT_SECONDS)
    refused = (
        TlsSettings(ca=other.certificate, server_name="tandem.example"),
        TlsSettings(ca=authority.certificate, server_name="other.example"),
        TlsSettings(ca=authority.certificate),
        TlsSettings(),
    )
    for tls in refused:
        with Client(address, token=TOKEN, tls=tls, max_retries=0) as client, pytest.raises(errors.Unavailable):
            client.health(timeout=TIMEOUT_SECONDS)
    assert len(door.seen) == 1


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_trace_context_goes_with_its_call_only(serve: Any, door: Door, token: str | None) -> None:
    door.code = grpc.StatusCode.INVALID_ARGUMENT
    with Client(serve(), token=token) as client:
        for options in ({"traceparent": TRACEPARENT}, {}):
            with pytest.raises(errors.InvalidArgument):
                list(client.generate("a", **options))
    traced, plain = (metadata for _, metadata in door.seen)
    assert (traced["traceparent"], "traceparent" in plain) == (TRACEPARENT, False)
    assert [metadata.get("authorization") for metadata in (traced, plain)] == [token and f"Bearer {token}"] * 2


@pytest.mark.parametrize("value", ["", "x", TRACEPARENT.upper(), TRACEPARENT + "\n", TRACEPARENT + ", b"])
def test_a_malformed_trace_context_is_refused_before_it_is_sent(value: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match="traceparent must have the form"):
        client.generate("a", traceparent=value)
