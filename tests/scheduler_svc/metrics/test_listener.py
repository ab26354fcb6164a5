"""The metrics page behind its door: which addresses, which tokens and certificates, and TLS that follows its files."""

import contextlib
import hashlib
import logging
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.door import tls_files
from scheduler_svc.door.tls_files import TlsFiles
from scheduler_svc.door.token_file import TokenFile
from scheduler_svc.metrics import http_server
from scheduler_svc.metrics.listener import MetricsListener, refusal
from scheduler_svc.processes.address import ListenError
from tests.rigs.authorities import Authority, Pair
from tests.rigs.metrics_page import fetch
from tests.rigs.waiting import TIMEOUT_SECONDS, until

READER, CALLER, EXPIRED = (f"tandem_{name}" for name in ("reader", "caller", "expired"))


def token_file(folder: Path, more: str = "") -> TokenFile:
    def entry(token: str, rights: str) -> str:
        return f'{{ hash = "sha256:{hashlib.sha256(token.encode()).hexdigest()}", rights = {rights} }}'

    expired = entry(EXPIRED, '["metrics"]').replace(" }", ", expires = 2020-01-01T00:00:00Z }")
    entries = ", ".join((entry(READER, '["metrics"]'), entry(CALLER, '["inference", "control"]'), expired))
    path = folder / "tokens.toml"
    path.write_text(f"[tenants.ops]\ntokens = [{entries}]\n{more}")
    path.chmod(0o600)
    return TokenFile(path)


@contextmanager
def listening(listen: str = "127.0.0.1:0", **door: Any) -> Iterator[str]:
    listener = MetricsListener(listen, **{"tokens": None, "tls": None, **door})
    try:
        listener.start()
        yield listener.url
    finally:
        listener.close()


def files_of(pair: Pair, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(certificate=pair.certificate, key=pair.key, client_ca=client_ca)


def status(url: str, **how: Any) -> int:
    try:
        fetch(url, **how)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def test_without_tokens_everybody_on_loopback_may_read() -> None:
    with listening() as url:
        assert url.startswith("http://127.0.0.1:")
        assert fetch(url).get("tandem_workers") == 0
        assert fetch(url, token="anything").get("tandem_workers") == 0
    with pytest.raises(urllib.error.URLError):
        fetch(url)
    # This name is every address of loopback.
    with listening("localhost:0") as url:
        for each in (url, url.replace("localhost", "127.0.0.1")):
            assert fetch(each).get("tandem_workers") == 0


def test_other_addresses_need_tls_and_tokens(tmp_path: Path) -> None:
    tokens, tls = token_file(tmp_path), files_of(Authority(tmp_path).issue("service"))
    both = "--tls-cert, --tls-key and --tokens are missing"
    for given, missing in (
        ({}, both),
        ({"tls": tls}, "--tokens is missing"),
        ({"tokens": tokens}, "--tls-cert and --tls-key are missing"),
    ):
        for host in ("0.0.0.0", "[::]", "192.168.0.1", "example.com"):
            with pytest.raises(ListenError, match=missing):
                MetricsListener(f"{host}:0", **{"tokens": None, "tls": None, **given})
    with listening("0.0.0.0:0", tokens=tokens, tls=tls) as url:
        assert url.startswith("https://0.0.0.0:")


def test_an_address_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with listening() as url:
        where = url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(ListenError, match=f"the port is taken; choose another with --metrics-listen.*{where}"):
            MetricsListener(where, tokens=None, tls=None)
    with pytest.raises(ListenError, match="must be HOST:PORT"):
        MetricsListener("9090", tokens=None, tls=None)
    # An address of a link without the link's name. The cause is the system's own words.
    tokens, tls = token_file(tmp_path), files_of(Authority(tmp_path).issue("service"))
    with pytest.raises(ListenError, match=r"^[^(;]+; choose another with .*: cannot listen on \[fe80::1\]:0$"):
        MetricsListener("[fe80::1]:0", tokens=tokens, tls=tls)


def test_a_token_with_the_right_is_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with listening(tokens=token_file(tmp_path)) as url:
        assert status(url) == 401
        assert status(url, token=READER) == 200
        assert status(url, token=CALLER) == 403
        for wrong in (EXPIRED, "tandem_wrong", READER + "x", "", " ", "x" * 600):
            assert status(url, token=wrong) == 401
        for header in (READER, f"Basic {READER}", f"Bearer {READER} {READER}"):
            request = urllib.request.Request(url, headers={"Authorization": header})
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        assert status(url.replace("/metrics", "/"), token=CALLER) == 403
        assert status(url.replace("/metrics", "/"), token=READER) == 404
    assert not [token for token in (READER, CALLER, EXPIRED) if token in caplog.text]


def test_one_of_several_tokens_is_not_believed(tmp_path: Path) -> None:
    tokens, valid = token_file(tmp_path), f"Bearer {READER}".encode()
    assert refusal(tokens, [valid], None) is None
    assert refusal(tokens, [valid.replace(b"Bearer", b"bEARER")], None) is None
    for several in ([valid, valid], [valid, b"Basic x"], [b"", valid]):
        assert refusal(tokens, several, None) is HTTPStatus.UNAUTHORIZED


def test_a_revoked_token_loses_the_page(tmp_path: Path) -> None:
    tokens = token_file(tmp_path)
    with listening(tokens=tokens) as url:
        assert status(url, token=READER) == 200
        (tmp_path / "tokens.toml").write_text("[tenants.ops]\n")
        until(tokens.poll)
        assert status(url, token=READER) == 401


def client_context(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def test_tls_follows_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_files, "LOOK_SECONDS", 0.0)
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair = old.issue("service", "IP:127.0.0.1")
    with listening(tokens=token_file(tmp_path), tls=files_of(pair)) as url:
        assert url.startswith("https://")
        assert status(url, token=READER, context=client_context(old)) == 200
        with pytest.raises(urllib.error.URLError):
            fetch(url, token=READER, context=client_context(new))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            fetch(url.replace("https", "http"), token=READER)
        new.issue("service", "IP:127.0.0.1")
        assert status(url, token=READER, context=client_context(new)) == 200
        # A file that cannot be used changes nothing.
        pair.key.write_text("nonsense")
        assert status(url, token=READER, context=client_context(new)) == 200
        pair.certificate.unlink()
        assert status(url, token=READER, context=client_context(new)) == 200


def test_client_certificates_have_rights_too(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    more = 'certificates = [{ name = "reader.example", rights = ["metrics"] }, "caller.example"]\n'
    tokens = token_file(tmp_path, more)
    tls = files_of(authority.issue("service", "IP:127.0.0.1"), authority.certificate)
    reader, caller = authority.issue("r", "DNS:reader.example"), authority.issue("caller.example")
    stranger, forged = authority.issue("stranger"), other.issue("f", "DNS:reader.example", file="forged")
    with listening(tokens=tokens, tls=tls) as url:
        assert status(url, context=client_context(authority, reader)) == 200
        assert status(url, context=client_context(authority, caller)) == 403
        assert status(url, context=client_context(authority, stranger)) == 401
        assert status(url, token=READER, context=client_context(authority, stranger)) == 200
        assert status(url, token="tandem_wrong", context=client_context(authority, reader)) == 401
        for pair in (None, forged):
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                fetch(url, token=READER, context=client_context(authority, pair))


def is_served(url: str, context: ssl.SSLContext) -> bool:
    try:
        return status(url, token=READER, context=context) == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_slow_handshake_is_cut_off_and_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HttpLimits", partial(http_server.HttpLimits, handshake_seconds=0.3))
    authority = Authority(tmp_path)
    tls = files_of(authority.issue("service", "IP:127.0.0.1"))
    with listening(tokens=token_file(tmp_path), tls=tls) as url:
        host, _, port = url.removeprefix("https://").removesuffix("/metrics").rpartition(":")
        slow = [socket.create_connection((host, int(port)), TIMEOUT_SECONDS) for _ in range(4)]
        # The first bytes of a ClientHello.
        for connection in slow:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")
        # On a busy machine this handshake, too, may take longer than the limit.
        until(lambda: is_served(url, client_context(authority)))
        for connection in slow:
            with connection, contextlib.suppress(ConnectionError):
                assert connection.recv(100) == b""


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = client_context(authority)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    tls = files_of(authority.issue("service", "IP:127.0.0.1"))
    with (
        listening(tokens=token_file(tmp_path), tls=tls) as url,
        pytest.raises((urllib.error.URLError, ConnectionError)),
    ):
        fetch(url, token=READER, context=context)
