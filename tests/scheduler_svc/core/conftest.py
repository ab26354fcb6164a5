"""The world that most tests of the core begin with."""

import pytest

from tests.scheduler_svc.core.world import World


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """A world with the SHAPE of the test's module, or with the default one."""
    return World(getattr(request.module, "SHAPE", None))
