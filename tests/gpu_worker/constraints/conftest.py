"""Mask servers of these tests, which start in each of them, are forked by a process that has imported them."""

from collections.abc import Iterator

import pytest

from tests.rigs.processes import forking


@pytest.fixture(autouse=True, scope="module")
def forked_mask_servers() -> Iterator[None]:
    with forking("gpu_worker.constraints"):
        yield
