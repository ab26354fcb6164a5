"""HTTP proxies that variables name, and wildcard addresses: nothing of the service itself is called through either."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tandem_client import AsyncClient, Client
from tandem_client.address import dialled
from tandem_client.connection import Access, channel_options
from tandem_client.gateway.service import Service
from tandem_client.peer import is_plaintext
from tandem_client.services.gateway import gateway_flags
from tandem_client.services.probe import Probe
from tests.client.fake_programs import READY, STAYS, Programs, serving_fakes
from tests.client.fake_service import FakeService
from tests.client.gateway.conftest import gateway_with

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


class HttpProxy:
    """Accepts connections, notes them and closes them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                self._listener.accept()[0].close()
                self.num_connections += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    """Every variable names a proxy that serves no call."""
    made = HttpProxy()
    for name in VARIABLES:
        monkeypatch.setenv(name, made.url)
        monkeypatch.setenv(name.upper(), made.url)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.close()


@pytest.fixture(params=["0.0.0.0", "[::]"])
def wildcard(request: pytest.FixtureRequest) -> Iterator[tuple[FakeService, str]]:
    """A service at every address of this machine, and the address as its line has it."""
    try:
        service = FakeService(address=f"{request.param}:0")
    except RuntimeError:
        pytest.skip("this machine has no IPv6")
    yield service, f"{request.param}:{service.address.rpartition(':')[2]}"
    service.stop()


async def test_a_supervised_service_at_a_wildcard_becomes_ready(
    wildcard: tuple[FakeService, str], programs: Programs, proxy: HttpProxy
) -> None:
    """And after the death of its worker again."""
    service, address = wildcard
    line = f"2026-11-22 02:12:58.026 core INFO frontend listening on {address}"
    programs(scheduler=f"say({line!r})\n{STAYS}", worker=STAYS)
    async with serving_fakes(service) as output:
        await output.until(READY)
    assert (output.end, proxy.num_connections) == ((0, ""), 0)


def test_client_and_gateway_call_a_wildcard_at_loopback(wildcard: tuple[FakeService, str], proxy: HttpProxy) -> None:
    """With a token too, because it does not leave the machine."""
    _, address = wildcard
    with Client(address, token="tandem_x") as client:
        assert client.health()
    assert is_plaintext(address)
    assert proxy.num_connections == 0
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with (
        gateway_with("--address", address, "--health-address", address) as (_, url),
        opener.open(f"{url}/health") as answer,
    ):
        assert answer.status == 200
    assert proxy.num_connections == 0


def test_only_callers_of_another_machine_use_the_proxy() -> None:
    def uses(access: object) -> bool:
        assert isinstance(access, Access)
        options = channel_options(access._target, proxy=access.proxy)
        return bool(dict(options)["grpc.enable_http_proxy"])

    service = Service.__new__(Service)
    service.connect = lambda: None
    service.__init__("service.example:1", None)
    assert not uses(service._access)
    assert not uses(Probe("service.example:1")._access)
    assert uses(Client("service.example:1")._access) and uses(AsyncClient("service.example:1")._access)
    assert not uses(Client("0.0.0.0:1")._access)
    # The client connects to each address of several by itself.
    assert not uses(Client("ipv4:192.0.2.1:1,192.0.2.2:1")._access)
    assert not uses(Client("dns:///service.example:1")._access)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "localhost:1"),
        ("[0:0::0]:1", "localhost:1"),
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("[::1]:1", "[::1]:1"),
        ("there.example:1", "there.example:1"),
        ("unix:/tmp/s", "unix:/tmp/s"),
        ("nothing", "nothing"),
    ],
)
def test_a_wildcard_is_called_at_loopback(address: str, expected: str) -> None:
    assert dialled(address) == expected
    if expected.endswith(":1"):
        assert gateway_flags({"tls_cert": None, "tls_key": None}, address) == [f"--address={expected}"]
