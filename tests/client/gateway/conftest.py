"""A gateway of this module's tests, in front of a fake service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.client.fake_service import one_completion
from tests.client.gateway.told_service import ToldService
from tests.rigs.processes import Child

# The origin of a web page that may call.
PAGE = "https://app.example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronted:
    """The fake service, the gateway before it, and a client of OpenAI's."""

    service: ToldService
    gateway: Child
    url: str
    client: openai.OpenAI


@contextmanager
def gateway_with(*flags: str) -> Iterator[tuple[Child, str]]:
    """A gateway with these flags on a free port, its process and its URL. It must end in order."""
    gateway = Child("gateway", ["tandem_client.gateway", "--listen", "127.0.0.1:0", "--exit-with-parent", *flags])
    try:
        yield gateway, gateway.wait_line(r"gateway listening on (http\S+)$").group(1)
        assert gateway.terminate() == 0, gateway.output()
    finally:
        gateway.kill()


@contextmanager
def running(*flags: str, **of_service: Any) -> Iterator[Fronted]:
    """A fake service with these attributes, and a gateway before it with these flags, which must end in order."""
    service = ToldService()
    vars(service).update(of_service)
    try:
        with (
            gateway_with("--address", service.address, *flags) as (gateway, url),
            openai.OpenAI(base_url=f"{url}/v1", api_key="tandem_key", max_retries=0) as client,
        ):
            yield Fronted(service=service, gateway=gateway, url=url, client=client)
        assert "Traceback" not in gateway.output(), gateway.output()
    finally:
        service.stop()


@pytest.fixture(scope="module")
def module_fronted() -> Iterator[Fronted]:
    with running("--head-seconds", "60", "--cors-origins", PAGE) as made:
        yield made


@pytest.fixture
def fronted(module_fronted: Fronted) -> Fronted:
    """The module's gateway; the service has its first behaviour and no records."""
    service = module_fronted.service
    service.behaviour = one_completion
    service.requests.clear()
    service.endings.clear()
    return module_fronted
