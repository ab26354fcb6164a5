"""A fake service for each test, a client of it, and fake programs."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem_client import Client, async_client, sync_client
from tests.client import fake_programs
from tests.client.fake_service import WAIT_SECONDS, FakeService
from tests.client.proxied import Proxied


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()
    yield fake
    fake.stop()


@pytest.fixture
def proxied() -> Iterator[Proxied]:
    made = Proxied()
    yield made
    made.stop()


@pytest.fixture
def client(service: FakeService) -> Iterator[Client]:
    with Client(service.address) as made:
        yield made


@pytest.fixture
def patient_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves waits a second for its Abort; on a busy machine that may take longer."""
    for module in (async_client, sync_client):
        monkeypatch.setattr(module, "ABORT_SECONDS", WAIT_SECONDS)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that writes the code of both programs; `python -m` then finds these."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", fake_programs.environment(tmp_path)["PYTHONPATH"])

    def write(*, scheduler: str, worker: str) -> None:
        fake_programs.write_programs(tmp_path, scheduler=scheduler, worker=worker)

    return write
