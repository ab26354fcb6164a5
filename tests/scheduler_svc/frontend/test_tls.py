"""TLS of a front end with real handshakes: certificates that change, other authorities, plaintext, slow handshakes."""

import asyncio
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.door import tls_files
from scheduler_svc.door.tls_files import TlsFiles
from tests.rigs.authorities import Authority, Pair
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.failures import Code
from tests.scheduler_svc.frontend.fake_core import Service, allow, service
from tests.scheduler_svc.frontend.test_door import CLOSED, bearer, tenants, token_of

CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def served(authority: Authority) -> Pair:
    return authority.issue("service", "DNS:localhost", "IP:127.0.0.1")


def files(pair: Pair, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(certificate=pair.certificate, key=pair.key, client_ca=client_ca)


async def check(
    s: Service, ca: Path | None, own: Pair | None = None, metadata: Any = None
) -> tuple[grpc.StatusCode, str]:
    """The status of a health check over a new connection; `ca` None means plaintext."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        channel = grpc.aio.insecure_channel(s.address, options=options)
    else:
        key, chain = (None, None) if own is None else (own.key.read_bytes(), own.certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, chain)
        channel = grpc.aio.secure_channel(s.address, credentials, options=options)
    async with channel:
        call = channel.unary_unary(CHECK)(b"", metadata=metadata, timeout=TIMEOUT_SECONDS)
        return await call.code(), str(await call.details())


async def test_tokens_work_over_tls_and_plaintext_does_not(tmp_path: Path, authority: Authority, served: Pair) -> None:
    async with service(tmp_path, tls=files(served), needs_tokens=True, tenants=tenants()) as s:
        good = bearer(token_of("inference"))
        assert (await check(s, authority.certificate, metadata=good))[0] == Code.OK
        assert (await check(s, authority.certificate, metadata=bearer("tandem_no")))[0] == CLOSED[0]
        assert (await check(s, None, metadata=good))[0] == Code.UNAVAILABLE


async def test_only_new_versions_of_tls_are_spoken(tmp_path: Path, authority: Authority, served: Pair) -> None:
    async with service(tmp_path, tls=files(served)) as s:
        host, port = s.address.split(":")
        context = ssl.create_default_context(cafile=str(authority.certificate))
        context.set_alpn_protocols(["h2"])
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")


async def test_a_certificate_is_replaced_without_a_restart(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_SECONDS", 0.0)
    other = Authority(tmp_path, "other")
    first, second = authority.issue("first", "IP:127.0.0.1"), other.issue("second", "IP:127.0.0.1")
    used = Pair(tmp_path / "used.pem", tmp_path / "used.key")

    def install(certificate: Path, key: Path) -> None:
        shutil.copy(certificate, used.certificate)
        shutil.copy(key, used.key)

    install(first.certificate, first.key)
    async with service(tmp_path, tls=files(used)) as s:
        old, new = authority.certificate, other.certificate
        assert (await check(s, old))[0] == Code.OK
        assert (await check(s, new))[0] == Code.UNAVAILABLE
        # A certificate with the key of another one, as between the two writes of a renewal; then a file of nonsense.
        install(second.certificate, first.key)
        assert (await check(s, old))[0] == Code.OK
        used.key.write_text("nonsense")
        assert (await check(s, old))[0] == Code.OK
        assert "stays in force" in caplog.text
        install(second.certificate, second.key)
        assert (await check(s, new))[0] == Code.OK
        assert (await check(s, old))[0] == Code.UNAVAILABLE
        used.key.unlink()
        assert (await check(s, new))[0] == Code.OK


async def test_certificates_of_clients_name_their_tenants(authority: Authority, served: Pair, tmp_path: Path) -> None:
    other = Authority(tmp_path, "authority")
    by_dns, by_uri = authority.issue("x", "DNS:a.example"), authority.issue("y", "URI:spiffe://example/b")
    by_name, unknown = authority.issue("c.example"), authority.issue("unknown", "DNS:unknown.example")
    forged, self_signed = other.issue("forged", "DNS:a.example"), Pair(other.certificate, tmp_path / "authority.key")
    names = ("a.example", "spiffe://example/b", "c.example")
    async with service(tmp_path, tls=files(served, authority.certificate), needs_tokens=True) as s:
        listed = [
            frontend_pb2.Tenant(name=f"t{i}", certificates=[frontend_pb2.Certificate(name=name, rights=["inference"])])
            for i, name in enumerate(names)
        ]
        await allow(s, tenants(*listed))
        ca = authority.certificate
        for own in (by_dns, by_uri, by_name):
            assert (await check(s, ca, own))[0] == Code.OK
            assert (await check(s, ca, own, bearer("tandem_wrong")))[0] == Code.UNAUTHENTICATED
        assert await check(s, ca, unknown) == (Code.UNAUTHENTICATED, "a token or a known certificate is needed")
        assert (await check(s, ca, unknown, bearer(token_of("metrics"))))[0] == Code.OK
        for own in (None, forged, self_signed):
            assert (await check(s, ca, own, bearer(token_of("metrics"))))[0] == Code.UNAVAILABLE


async def test_a_hundred_half_open_handshakes_stop_nobody(tmp_path: Path, authority: Authority, served: Pair) -> None:
    async with service(tmp_path, tls=files(served)) as s:
        host, port = s.address.split(":")
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
        sockets = [socket.create_connection((host, int(port))) for _ in range(100)]
        try:
            for number, one in enumerate(sockets):
                # A third is silent, a third stops within its first message, a third speaks no TLS.
                one.sendall((b"", hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[number % 3])
            for _ in range(10):
                assert (await check(s, authority.certificate))[0] == Code.OK
        finally:
            for one in sockets:
                one.close()


async def test_a_silent_handshake_is_ended(
    tmp_path: Path, authority: Authority, served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scheduler_svc.frontend.rpc import options

    monkeypatch.setattr(options, "HANDSHAKE_MS", 300)
    async with service(tmp_path, tls=files(served)) as s:
        host, port = s.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
        assert (await check(s, authority.certificate))[0] == Code.OK


async def test_headers_above_the_limit_are_refused(tmp_path: Path, authority: Authority, served: Pair) -> None:
    async with service(tmp_path, tls=files(served), needs_tokens=True, tenants=tenants()) as s:
        for size in (2_000, 200_000):
            status, details = await check(s, authority.certificate, metadata=bearer("tandem_" + "x" * size))
            assert status in (Code.UNAUTHENTICATED, Code.RESOURCE_EXHAUSTED), details
            assert "xxx" not in details
        good = bearer(token_of("inference"))
        assert (await check(s, authority.certificate, metadata=good))[0] == Code.OK
