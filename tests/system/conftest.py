"""Fixtures of the system tests: a rig of real processes, alone or shared by a module's tests."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.rigs.processes import Child, Rig, SchedulerProcess
from tests.rigs.streams import Caller


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Processes of this test alone."""
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
    """A service that the module's tests share; each must leave it idle, with every page back."""
    yield module_served
    module_served.caller.wait_idle()
    assert module_served.rig.violations() == []
