"""Several processes at one address, and settings that are refused."""

import os
import signal

import httpx2 as httpx
import psutil
import pytest

from tandem_client.gateway.settings import SettingsError, load
from tests.client.fake_service import one_completion
from tests.client.gateway.conftest import start_gateway
from tests.client.gateway.told_service import ToldService


def test_a_dead_process_is_replaced_and_the_counters_are_sums() -> None:
    service = ToldService()
    service.behaviour = one_completion
    gateway, url = start_gateway("--address", service.address, "--processes", "2")
    try:
        children = psutil.Process(gateway.pid).children()
        assert len(children) == 2
        for _ in range(20):
            # A connection each, so that the kernel chooses a process each time.
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        line = 'tandem_gateway_requests_total{endpoint="completions",status="200"} 20'
        assert all(line in httpx.get(f"{url}/metrics").text for _ in range(6))
        seen = len(gateway.lines)
        os.kill(children[0].pid, signal.SIGKILL)
        gateway.wait_line(r"was ended by SIGKILL; it starts again", after=seen)
        gateway.wait_line(r"gateway listening", after=seen)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        assert f"{line[:-2]}21" in httpx.get(f"{url}/metrics").text
        assert gateway.terminate() == 0, gateway.output()
        assert not [child for child in children if child.is_running()]
    finally:
        gateway.kill()
        service.stop()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:8000"], "without TLS the gateway listens on loopback addresses only"),
        (["--listen", "8000"], "--listen is 8000; it must be HOST:PORT"),
        (["--address", "example.org:1"], "without encryption; give --service-ca"),
        (["--tls-cert", "a"], "--tls-key is missing"),
        (["--processes", "0"], "--processes is 0; it must be a whole number from 1 to 64"),
        (["--head-seconds", "x"], "--head-seconds is x; it must be a number"),
        (["--log-format", "xml"], "it must be one of text, json"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_settings(flags: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        load(flags, {})


def test_variables() -> None:
    found = load(
        [], {"TANDEM_GATEWAY_PROCESSES": "3", "TANDEM_ADDRESS": "127.0.0.1:9", "TANDEM_GATEWAY_SERVICE_TLS": "true"}
    )
    assert (found.processes, found.address, found.service_tls) == (3, "127.0.0.1:9", True)
    assert load(["--processes", "4"], {"TANDEM_GATEWAY_PROCESSES": "3"}).processes == 4
    with pytest.raises(SettingsError, match="there is no setting TANDEM_GATEWAY_NONE"):
        load([], {"TANDEM_GATEWAY_NONE": "1"})
