"""Several processes at one address, and settings that are refused."""

import os
import re
import signal
from contextlib import suppress

import httpx2 as httpx
import psutil
import pytest

from tandem_client.gateway.settings import PROGRAM
from tandem_contract.settings import SettingError
from tests.client.fake_service import endless
from tests.client.gateway import plain_http
from tests.client.gateway.conftest import gateway_with, running
from tests.rigs.processes import run
from tests.rigs.waiting import until


@pytest.mark.parametrize("first", ["1", "2"])
def test_a_second_gateway_does_not_share_the_address(first: str) -> None:
    with gateway_with("--address", "127.0.0.1:1", "--processes", first) as (_, url):
        address = url.removeprefix("http://")
        for second in ("1", "2"):
            ended = run("tandem_client.gateway", "--listen", address, "--processes", second)
            assert ended.returncode == 2
            assert f"the gateway cannot listen on {address}: Address already in use" in ended.stderr


def test_the_help_hides_flags_of_the_children(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PROGRAM.read(["--help"], {})
    shown = capsys.readouterr().out
    assert "--processes N" in shown
    assert "SUPPRESS" not in shown and "--table" not in shown


def test_a_dead_process_is_replaced_and_the_counters_are_sums() -> None:
    with running("--processes", "2") as made:
        gateway, url = made.gateway, made.url
        children = psutil.Process(gateway.pid).children()
        assert len(children) == 2
        for _ in range(20):
            # A connection each, so that the kernel chooses a process each time.
            assert plain_http.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        line = 'tandem_gateway_requests_total{endpoint="completions",status="200"} 20'
        # A request is counted when its answer has been sent.
        until(lambda: line in plain_http.get(f"{url}/metrics").text)
        assert all(line in plain_http.get(f"{url}/metrics").text for _ in range(6))
        seen = len(gateway.lines)
        os.kill(children[0].pid, signal.SIGKILL)
        gateway.wait_line(r"was ended by SIGKILL; it starts again", after=seen)
        gateway.wait_line(r"gateway listening", after=seen)
        assert plain_http.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        until(lambda: f"{line[:-2]}21" in plain_http.get(f"{url}/metrics").text)
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_one_signal_drains_and_a_second_one_ends_what_runs(processes: str) -> None:
    """The first one goes to every process, as systemd sends it; the second one to the gateway alone."""
    with running("--processes", processes, behaviour=endless) as made:
        gateway, own = made.gateway, psutil.Process(made.gateway.pid)
        with (
            httpx.Client(base_url=made.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer,
        ):
            pieces = answer.iter_raw()
            next(pieces)
            for process in (*own.children(), own):
                process.send_signal(signal.SIGTERM)
            seen = 0
            for _ in range(int(processes)):
                gateway.wait_line(r"stopping: new requests get 503", after=seen)
                seen = 1 + next(i for i, line in enumerate(gateway.lines) if i >= seen and "get 503" in line)
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            gateway.signal(signal.SIGTERM)
            # Its service never ends this stream, so the gateway does, and says so where it still can.
            with suppress(httpx.RemoteProtocolError):
                assert b'finish_reason":"' not in b"".join(pieces)
        assert gateway.wait() == 0, gateway.output()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:8000"], "without TLS the gateway listens on loopback addresses only"),
        (["--listen", "8000"], "--listen is 8000; it must be HOST:PORT"),
        (["--listen", "::1:8000"], "--listen is ::1:8000; an IPv6 address needs brackets: write [::1]:8000"),
        (["--listen", "2001:db8::5"], "an IPv6 address needs brackets: write [2001:db8::5]:PORT"),
        (["--address", "::1:50051"], "--address is ::1:50051; an IPv6 address needs brackets: write [::1]:50051"),
        (["--address", "example.org:1"], "without encryption; give --service-ca"),
        (["--tls-cert", "a"], "--tls-key is missing"),
        (["--processes", "0"], "--processes is 0; it must be a whole number from 1 to 64"),
        (["--head-seconds", "x"], "--head-seconds is 'x'; it must be a number from 0.1 to 3,600"),
        (["--log-format", "xml"], "it must be one of text, json"),
        (["--nonsense"], "there is no flag --nonsense"),
    ],
)
def test_wrong_settings(flags: list[str], words: str) -> None:
    with pytest.raises(SettingError, match=re.escape(words)):
        PROGRAM.read(flags, {})
