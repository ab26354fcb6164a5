"""Shared by the tests of graphs: one rig, captured again for each test."""

from collections.abc import Callable, Sequence

import pytest

from tests.gpu_worker.cuda.rig import GraphRig, Observed, Scenario
from tests.rigs.torch_kernels import torch_kernels


@pytest.fixture(scope="package")
def graph_rig() -> GraphRig:
    with torch_kernels():
        return GraphRig()


@pytest.fixture
def rig(graph_rig: GraphRig) -> GraphRig:
    graph_rig.capture()
    return graph_rig


@pytest.fixture(scope="package")
def eager(graph_rig: GraphRig) -> Callable[[Scenario], Sequence[Observed]]:
    """What a scenario gives without graphs."""
    known: dict[Scenario, Sequence[Observed]] = {}

    def run(scenario: Scenario) -> Sequence[Observed]:
        if scenario not in known:
            with graph_rig.without_graphs():
                known[scenario] = graph_rig.observed(scenario)
        return known[scenario]

    return run
