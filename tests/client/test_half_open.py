"""Connections that no side closed, and that carry nothing any more: their streams end or continue.

No caller sets a deadline, and the proxy closes nothing, so only the client itself can find out.
"""

import json
import threading
import urllib.request

import pytest
from tandem.v1 import inference_pb2 as pb

from tandem_client import Client, connection
from tandem_client.cli.reporting import Exit
from tandem_client.errors import Unavailable
from tests.client.both import Connect, either, of_loop
from tests.client.fake_service import Ending, FakeService, delta, finished, sending, summary
from tests.client.gateway.told_service import ToldService
from tests.client.listeners import Proxy
from tests.client.quick_pings import PING_MS
from tests.rigs.processes import Child
from tests.rigs.waiting import TIMEOUT_SECONDS, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPALIVE_MS", "PING_TIMEOUT_MS", "CONNECT_TIMEOUT_MS"):
        monkeypatch.setattr(connection, name, PING_MS)


# One token, then nothing.
begins = sending(delta(0, [5], "Ré"), Ending.wait)
goes_on = sending(delta(1, [6], "turn"), finished(2), summary(2))


def cut_under(proxy: Proxy, connect: Connect, *, resume: bool, swallowed: int = 0) -> list[str | Exception]:
    """Cuts the connection under a running stream. Returns its texts, and its error."""
    began, found = threading.Event(), list[str | Exception]()

    def run() -> None:
        try:
            with connect(proxy.address) as client:
                for delta in client.generate("hi", resume=resume):
                    found.append(delta.text)
                    began.set()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert began.wait(TIMEOUT_SECONDS), found
    proxy.cut(swallowed=swallowed)
    thread.join(TIMEOUT_SECONDS)
    return found


@either
def test_a_stream_over_a_dead_connection_ends(service: FakeService, connect: Connect) -> None:
    service.behaviour = begins
    with Proxy(service.address) as proxy:
        text, error = cut_under(proxy, connect, resume=False)
        assert text == "Ré"
        assert isinstance(error, Unavailable) and error.stream_began, error
        assert str(error).startswith(f"{proxy.address} does not answer any more: ")


@pytest.mark.usefixtures("patient_aborts")
@pytest.mark.parametrize(("connect", "swallowed"), [(Client, 0), (of_loop, 1)])
def test_a_stream_with_resume_continues_on_another_connection(
    service: FakeService, connect: Connect, swallowed: int
) -> None:
    """Also if the next attempt to connect meets a black hole."""
    service.behaviour, service.resumption = begins, goes_on
    with Proxy(service.address) as proxy:
        assert cut_under(proxy, connect, resume=True, swallowed=swallowed) == ["Ré", "turn"]
        assert service.resumed[0].offsets == [pb.SampleOffset(token_ids=1, text_chars=2)]


def test_the_command_line_ends_over_a_dead_connection(service: FakeService) -> None:
    service.behaviour = begins
    with Proxy(service.address) as proxy:
        program = ["tandem_client.cli", "generate", "hi", "--address", proxy.address]
        child = Child("tandem", ["tests.client.quick_pings", *program])
        until(lambda: "Ré" in child.output() or service.endings)
        proxy.cut()
        assert child.wait() == Exit.UNAVAILABLE, child.output()
        assert f"{proxy.address} does not answer any more" in child.output()


def test_the_gateway_ends_a_stream_over_a_dead_connection() -> None:
    service = ToldService()
    service.behaviour = begins
    with Proxy(service.address) as proxy:
        program = ["tandem_client.gateway", "--listen=127.0.0.1:0", f"--address={proxy.address}", "--exit-with-parent"]
        child = Child("gateway", ["tests.client.quick_pings", *program])
        url = child.wait_line(r"gateway listening on (http\S+)$").group(1)
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer tandem_key"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            assert b"R" in answer.readline()
            proxy.cut()
            rest = answer.read().decode()
        assert f"{proxy.address} does not answer any more" in rest and "[DONE]" not in rest, rest
        assert child.terminate() == 0, child.output()
    service.stop()
