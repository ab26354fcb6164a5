"""Replayed steps give the logits of eager steps, bit for bit, and the same tokens."""

from collections.abc import Callable, Sequence

import pytest

from tests.gpu_worker.cuda import scenarios
from tests.gpu_worker.cuda.rig import GraphRig, Observed, Scenario

Eager = Callable[[Scenario], Sequence[Observed]]


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_replays_equal_eager_steps(rig: GraphRig, eager: Eager, scenario: Scenario) -> None:
    assert rig.flaw(scenario, eager(scenario)) == ""


def test_every_shape_is_captured_and_replayed(rig: GraphRig) -> None:
    backend = rig.capture()
    assert rig.graphs.num_graphs == len(rig.runner.steps.shapes.steps) == len(backend.graphs)
    assert rig.graphs.pool_bytes > 0
    rig.observed(scenarios.every_shape)
    assert all(graph.num_replays for graph in backend.graphs)


def test_a_second_capture_gives_the_same_operators(rig: GraphRig) -> None:
    one, other = rig.capture(), rig.capture()
    assert [graph.operators for graph in one.graphs] == [graph.operators for graph in other.graphs]


def test_the_scenarios_have_different_plans_through_one_graph(rig: GraphRig, eager: Eager) -> None:
    logits = [step.logits for step in eager(scenarios.every_shape) if step.logits is not None]
    values = {tuple(row[:4].tolist()) for step in logits for row in step}
    assert len(values) == sum(len(step) for step in logits)
