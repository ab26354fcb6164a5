"""What a command says of an address that it cannot use: the exact line, with the flag that helps, and the exit code."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from tandem_client.address import problem_of
from tandem_client.cli.__main__ import app
from tandem_client.connection import Access
from tests.rigs.authorities import Authority, Pair
from tests.rigs.processes import child_environment, free_address
from tests.rigs.waiting import TIMEOUT_SECONDS

HELP = " (tandem info --help)"


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"TANDEM_ADDRESS": "", "TANDEM_TLS": "", "TANDEM_TOKEN": ""}).invoke(app, arguments)
    assert result.stdout == "" and result.stderr.count("\n") == 1, result.output
    return result.exit_code, result.stderr.removesuffix("\n")


@dataclass
class Rig:
    """Services of each kind at loopback addresses. The certificate is for tandem.example alone."""

    folder: Path
    authority: Authority
    stranger: Authority
    own: Pair
    servers: list[grpc.Server]

    def serve(self, credentials: grpc.ServerCredentials | None = None) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        address = "127.0.0.1:0"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        server.start()
        self.servers.append(server)
        return f"127.0.0.1:{port}"

    def with_tls(self, *, asks_for_certificates: bool = False) -> str:
        return self.serve(self.own.of_server(self.authority.certificate if asks_for_certificates else None))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("authorities")
    authority = Authority(folder)
    own = authority.issue("service", "DNS:tandem.example", "DNS:*.tandem.test")
    made = Rig(folder=folder, authority=authority, stranger=Authority(folder, "stranger"), own=own, servers=[])
    yield made
    for server in made.servers:
        server.stop(0)


@pytest.fixture
def http_server() -> Iterator[str]:
    """A server of HTTP/1.1, which takes the preface of HTTP/2 for a malformed request, as the gateway does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=run)
        thread.start()
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


Case = Callable[[Rig], tuple[str, list[str], str]]


def trusting(rig: Rig, *more: str) -> list[str]:
    return ["--tls-ca", str(rig.authority.certificate), *more]


NAMED = ("--tls-server-name", "tandem.example")
CASES: dict[str, Case] = {
    "TLS client, plaintext service": lambda rig: (
        rig.serve(), trusting(rig), "the service at ADDRESS speaks plaintext; leave --tls and TANDEM_TLS out",
    ),
    "plaintext client, service with TLS": lambda rig: (
        rig.with_tls(), [], "the service at ADDRESS speaks TLS; give --tls",
    ),
    "plaintext client, service that asks for certificates": lambda rig: (
        rig.with_tls(asks_for_certificates=True), [], "the service at ADDRESS speaks TLS; give --tls",
    ),
    "another name in the certificate": lambda rig: (
        rig.with_tls(), trusting(rig),
        "the certificate of the service at ADDRESS is for tandem.example, *.tandem.test and not for 127.0.0.1; "
        "give --tls-server-name, one of the certificate's names",
    ),
    "a name below the wildcard's": lambda rig: (
        rig.with_tls(), trusting(rig, "--tls-server-name", "a.b.tandem.test"),
        "the certificate of the service at ADDRESS is for tandem.example, *.tandem.test and not for a.b.tandem.test; "
        "give --tls-server-name, one of the certificate's names",
    ),
    "unknown authority": lambda rig: (
        rig.with_tls(), ["--tls-ca", str(rig.stranger.certificate), *NAMED],
        f"the certificate of the service at ADDRESS is not from {rig.stranger.certificate} (--tls-ca): "
        "unable to get local issuer certificate",
    ),
    "public authorities": lambda rig: (
        rig.with_tls(), ["--tls", *NAMED],
        "the certificate of the service at ADDRESS is not of a known authority; give --tls-ca: "
        "unable to get local issuer certificate",
    ),
    "missing certificate of the client": lambda rig: (
        rig.with_tls(asks_for_certificates=True), trusting(rig, *NAMED),
        "the service at ADDRESS wants a certificate of its clients; give --tls-cert and --tls-key",
    ),
    "a stranger's certificate": lambda rig: (
        rig.with_tls(asks_for_certificates=True),
        trusting(rig, *NAMED, "--tls-cert", str(rig.stranger.certificate),
                 "--tls-key", str(rig.stranger.certificate.with_suffix(".key"))),
        f"the service at ADDRESS does not accept the certificate of --tls-cert ({rig.stranger.certificate})",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", [("info",), ("generate", "hi"), ("health", "--wait", "60")])
def test_a_handshake_that_fails_names_its_cause_and_the_flag(rig: Rig, name: str, command: tuple[str, ...]) -> None:
    """By a call, by a stream, and by a wait, which another handshake does not help."""
    address, flags, words = CASES[name](rig)
    assert said(*command, "-a", address, *flags) == (2, f"error: {words.replace('ADDRESS', address)}")


@pytest.mark.parametrize("flags", [(), ("--tls",)])
def test_the_address_of_an_http_server_is_said_to_be_one(http_server: str, flags: tuple[str, ...]) -> None:
    words = "speaks HTTP/1.1 and no gRPC: it may be the HTTP gateway; the service itself has another port"
    for command in (("info",), ("generate", "hi"), ("health", "--wait", "60")):
        assert said(*command, "-a", http_server, *flags) == (2, f"error: {http_server} {words}")


@pytest.mark.parametrize(("verbosity", "lines"), [("", 1), ("DEBUG", 2)])
def test_the_lines_of_grpcs_library_are_not_between_those_for_people(rig: Rig, verbosity: str, lines: int) -> None:
    """A user sees them only with GRPC_VERBOSITY set."""
    address = rig.serve()
    # Not forked: the library reads its variable when it is loaded.
    command = [sys.executable, "-m", "tandem_client.cli", "info", "-a", address, *trusting(rig)]
    own = child_environment() | ({"GRPC_VERBOSITY": verbosity} if verbosity else {})
    done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=TIMEOUT_SECONDS)
    found = done.stderr.splitlines()
    assert found[-1] == f"error: the service at {address} speaks plaintext; leave --tls and TANDEM_TLS out"
    assert len(found) >= lines and (verbosity != "" or len(found) == 1), done.stderr


def test_the_json_of_a_health_that_is_waited_for_names_the_cause(rig: Rig) -> None:
    address = rig.with_tls()
    result = CliRunner().invoke(app, ["health", "--wait", "60", "--json", "-a", address])
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, found["state"]) == (2, "", "unreachable")
    assert found["reason"] == f"the service at {address} speaks TLS; give --tls"


def test_a_closed_port_is_still_no_service() -> None:
    address = free_address()
    hint = "start one with tandem serve, or name another address with --address or TANDEM_ADDRESS"
    line = f"error: nothing answers at {address}: Connection refused ({hint})"
    for flags in ((), ("--tls",)):
        assert said("info", "-a", address, *flags) == (3, line)


URL = "; a URL is the address of the HTTP gateway, and the service has another port"
PORT = "; a port is a number from 1 to 65535"
ADDRESSES = [
    ("http://127.0.0.1:8000", "127.0.0.1:8000" + URL),
    ("https://there:8000/v1", "there:8000" + URL),
    ("HTTP://there/v1/models?x=1", "there:50051" + URL),
    ("grpc://there:50051", "there:50051"),
    ("there:50051/v1", "there:50051"),
    ("there:50051/", "there:50051"),
    ("there", "there:50051"),
    ("there:", "there:50051"),
    (":50051", "127.0.0.1:50051"),
    ("there:65536", "there:50051" + PORT),
    ("there:0", "there:50051" + PORT),
    ("there:-1", "there:50051" + PORT),
    ("there:http", "there:50051" + PORT),
    ("there:５", "there:50051" + PORT),
    (" there:50051", "there:50051"),
    ("there: 50051\n", "there:50051"),
    ("::1", "[::1]:50051"),
    ("[::1]", "[::1]:50051"),
    ("fe80::1:50051:x", "[fe80::1:50051]:50051" + PORT),
    ("", "127.0.0.1:50051"),
    ("dns:///there:1 ", None),
]


@pytest.mark.parametrize(("address", "works"), ADDRESSES)
def test_a_malformed_address_is_told_with_one_that_works(address: str, works: str | None) -> None:
    problem = problem_of(address)
    if works is None:
        assert problem
        return
    assert problem == f"is {address!r}; it must be HOST:PORT, such as {works}"
    assert problem_of(works.partition(";")[0]) == ""
    if address.strip() == address and address:
        assert said("info", "-a", address) == (2, f"error: --address {problem}{HELP}")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "[::1]:65535", "there:50051", "dns:///there:1", "ipv4:1.2.3.4:5,6.7.8.9:1", "unix:/x", "unix:x"],
)
def test_what_can_be_called_is_taken(address: str) -> None:
    assert problem_of(address) == ""


@pytest.mark.parametrize(
    ("address", "flag", "line"),
    [
        (
            "192.0.2.1:1", "--token-file",
            "token would be sent to 192.0.2.1:1 without encryption; give --tls, or use an address of this machine",
        ),
        (
            "127.0.0.1:1", "--tls-cert",
            "--tls-key is missing; a client's certificate needs both --tls-cert and --tls-key",
        ),
    ],
)  # fmt: skip
def test_a_token_in_plaintext_and_half_a_certificate_name_the_flags(
    tmp_path: Path, address: str, flag: str, line: str
) -> None:
    (tmp_path / "file").write_text("tandem_abc")
    assert said("info", "-a", address, flag, str(tmp_path / "file")) == (2, f"error: {line}")


@pytest.mark.parametrize(
    ("address", "is_direct"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("there:1", False), ("dns:///there:1", False), ("unix:/x", False)],
)
def test_only_what_is_called_without_a_proxy_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, address: str, is_direct: bool
) -> None:
    """What listens behind a proxy is not to be had by a connection of this machine."""
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert Access(address=address).is_direct is is_direct
    monkeypatch.delenv("https_proxy")
    monkeypatch.setattr("tandem_client.connection.getproxies", dict)
    assert Access(address=address).is_direct is (is_direct or address == "there:1")
