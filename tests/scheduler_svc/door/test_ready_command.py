"""The command that tries the service: what callers need, and never a token."""

from pathlib import Path

import pytest

from scheduler_svc.door.tls_files import ReadyCommand, TlsFiles, certificate_names
from tests.rigs.authorities import Authority

TOKEN = "TANDEM_TOKEN=${TANDEM_TOKEN:?is not set} "


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("with a space"))


def files(authority: Authority, name: str, *alternatives: str) -> TlsFiles:
    pair = authority.issue(name, *alternatives)
    return TlsFiles(certificate=pair.certificate, key=pair.key)


def test_without_tls_the_address_is_enough() -> None:
    plain = ReadyCommand()
    assert plain.is_plain
    assert plain.at("127.0.0.1:50051") == 'tandem generate "Return the"'
    assert plain.at("127.0.0.1:4711") == 'tandem generate --address 127.0.0.1:4711 "Return the"'
    with_tokens = ReadyCommand(needs_tokens=True)
    assert not with_tokens.is_plain
    assert with_tokens.at("127.0.0.1:50051") == f'{TOKEN}tandem generate "Return the"'


@pytest.mark.parametrize(
    ("listen", "alternatives", "flags"),
    [
        ("127.0.0.1:1", ("IP:127.0.0.1",), "--address 127.0.0.1:1"),
        ("[::1]:1", ("IP:::1",), "--address [::1]:1"),
        ("[0:0:0:0:0:0:0:1]:1", ("IP:::1",), "--address [0:0:0:0:0:0:0:1]:1"),
        ("0.0.0.0:1", ("DNS:a.example", "DNS:localhost"), "--address localhost:1"),
        ("[::]:1", ("IP:127.0.0.1",), "--address 127.0.0.1:1"),
        ("0.0.0.0:1", ("DNS:a.example",), "--address 127.0.0.1:1 CA --tls-server-name a.example"),
        ("10.0.0.1:1", ("DNS:*.example",), "--address 10.0.0.1:1 CA --tls-server-name tandem.example"),
        ("127.0.0.1:1", (), "--address 127.0.0.1:1"),
    ],
)
def test_the_flags_of_tls_follow_from_the_certificate(
    authority: Authority, listen: str, alternatives: tuple[str, ...], flags: str
) -> None:
    tls = files(authority, "service", *alternatives)
    trust = f"--tls-ca '{tls.certificate}'"
    words = flags.replace("CA", trust) if "CA" in flags else f"{flags} {trust}"
    command = ReadyCommand(tls=tls, needs_tokens=True).at(listen)
    assert command == f'{TOKEN}tandem generate {words} "Return the"'


def test_a_client_certificate_takes_the_place_of_the_token(authority: Authority) -> None:
    pair = authority.issue("service", "DNS:localhost")
    tls = TlsFiles(certificate=pair.certificate, key=pair.key, client_ca=authority.certificate)
    command = ReadyCommand(tls=tls, needs_tokens=True).at("0.0.0.0:1")
    assert command.startswith("TANDEM_TLS_CERT=${TANDEM_TLS_CERT:?is not set} TANDEM_TLS_KEY=${TANDEM_TLS_KEY:?is not")
    assert "TOKEN" not in command


def test_names_of_a_certificate_that_signs_itself_and_of_no_certificate(authority: Authority, tmp_path: Path) -> None:
    names = certificate_names(
        files(authority, "both", "DNS:a.example", "IP:127.0.0.1", "URI:spiffe://x/y", "DNS:b.example")
    )
    assert names == ["a.example", "b.example", "127.0.0.1"]
    own = TlsFiles(certificate=authority.certificate, key=authority.certificate.with_suffix(".key"))
    assert certificate_names(own) == []
    # An address of five bytes.
    assert certificate_names(files(authority, "odd", "DER:30:07:87:05:01:02:03:04:05")) == ["<invalid>"]
    missing = TlsFiles(certificate=tmp_path / "none", key=tmp_path / "none")
    assert certificate_names(missing) == []
