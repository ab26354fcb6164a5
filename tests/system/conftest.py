"""Fixtures of the system tests: a rig of real processes, for one test or shared by all tests that leave it idle."""

from collections.abc import Iterator
from contextlib import ExitStack
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


class Shared:
    """The service of the session. It starts at its first use, and again after a test that did not leave it idle."""

    def __init__(self) -> None:
        self._running: tuple[Served, ExitStack] | None = None

    def served(self) -> Served:
        if self._running is None:
            with ExitStack() as stack:
                rig = stack.enter_context(Rig())
                scheduler, worker, caller = rig.serve("--num-pages", "256", "--max-rows", "16", "--max-length", "512")
                served = Served(rig=rig, scheduler=scheduler, worker=worker, caller=caller)
                self._running = served, stack.pop_all()
        return self._running[0]

    def check(self) -> None:
        """Raises if the service is not idle with every page free, or a worker got a wrong plan; then it is given up."""
        assert self._running is not None
        served, stack = self._running
        try:
            served.caller.wait_idle()
            assert served.rig.violations() == []
        except BaseException as error:
            self._running = None
            stack.__exit__(type(error), error, error.__traceback__)
            raise

    def end(self) -> None:
        """Ends the service in order and checks its processes."""
        if self._running is not None:
            self._running[1].close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.end()


@pytest.fixture
def served(shared: Shared) -> Iterator[Served]:
    """A service for all tests of the session; each test must leave it idle, with every page free."""
    yield shared.served()
    shared.check()
