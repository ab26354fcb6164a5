"""The world that most tests of the core begin with."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.scheduler_svc.core.world import World


@pytest.fixture
def world(request: pytest.FixtureRequest) -> "World":
    """A world with the SHAPE of the test's module, or with the default one."""
    # A core that cannot be imported is an error of each module of tests, and not of this one for all.
    from tests.scheduler_svc.core.world import World

    return World(getattr(request.module, "SHAPE", None))
