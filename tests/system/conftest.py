"""Fixtures of the system tests: a rig of real processes, for one test or shared by a module."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.rigs.processes import Child, Rig, SchedulerProcess
from tests.rigs.streams import Caller


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Processes for this test alone."""
    with Rig() as rig:
        yield rig


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    rig: Rig
    scheduler: SchedulerProcess
    worker: Child
    caller: Caller


@pytest.fixture(scope="module")
def module_served() -> Iterator[Served]:
    with Rig() as rig:
        scheduler, worker, caller = rig.serve("--num-pages", "256", "--max-rows", "16", "--max-length", "512")
        yield Served(rig=rig, scheduler=scheduler, worker=worker, caller=caller)


@pytest.fixture
def served(module_served: Served) -> Iterator[Served]:
    """A service shared by the module's tests; each test must leave it idle, with every page free."""
    yield module_served
    module_served.caller.wait_idle()
    assert module_served.rig.violations() == []
