"""Runs coroutine tests: in the event loop of their front end, which is in this process with a fake core, or in one of
their own.
"""

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.scheduler_svc.frontend.fake_core import Service, service


@pytest.fixture
def s(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The front end with the settings of `served`."""
    patches, settings = getattr(request.function, "served", ((), {}))
    for patch in patches:
        monkeypatch.setattr(*patch)
    running = service(tmp_path, **settings)
    with asyncio.Runner() as runner:
        made = runner.run(running.__aenter__())
        made.runner = runner
        yield made
        runner.run(running.__aexit__(None, None, None))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with nullcontext(given["s"].runner) if "s" in given else asyncio.Runner() as runner:
        runner.run(pyfuncitem.obj(**given))
    return True
