"""Runs a scenario against a front end in this process with a fake core."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.frontend.rpc import gate
from tests.scheduler_svc.frontend.fake_core import Service, service


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Keywords are settings of the front end. `state` is the core's model. With `ready=False` it sends nothing.

    No refusal is held, because tests are refused more often than callers that make a mistake.
    """
    monkeypatch.setattr(gate, "MAX_HOLD_SECONDS", 0.0)

    def runner(scenario: Callable[[Service], Awaitable[None]], **changes: Any) -> None:
        async def main() -> None:
            async with service(tmp_path, **changes) as under_test:
                await scenario(under_test)

        asyncio.run(main())

    return runner
