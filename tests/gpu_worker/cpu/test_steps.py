"""When a shape is captured, proven, replayed and given up; on a backend that counts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gpu_worker.cpu.graphs import ProvenSteps
from gpu_worker.graphs import NotCapturable


@dataclass
class _Graph:
    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


@dataclass
class _Backend:
    """Captures the double of the input, plus `flaw`."""

    flaw: float = 0.0
    error: Exception | None = None
    captured: int = 0
    pool_bytes: int = 0

    def capture(self, run: Callable[[], Tensor]) -> tuple[_Graph, Tensor]:
        self.captured += 1
        if self.error is not None:
            raise self.error
        result = run()
        return _Graph(lambda: result.copy_(run() + self.flaw)), result


@dataclass
class _Rig:
    backend: _Backend
    most_graphs: int = 40
    computed: int = 0
    prepared: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = ProvenSteps(
            self.backend,
            compute=self._compute,
            prepare=lambda inputs: self.prepared.append(float(inputs[0])),
            captures=lambda shape: shape != "large",
            most_graphs=self.most_graphs,
        )
        self.inputs = torch.zeros(2)

    def _compute(self, inputs: Tensor) -> Tensor:
        self.computed += 1
        return inputs * 2

    def run(self, value: float, shape: str = "one") -> float:
        self.inputs.fill_(value)
        return float(self.steps.run(shape, self.inputs)[0])


def test_the_third_step_of_a_shape_is_the_first_that_relies_on_its_graph():
    rig = _Rig(_Backend())
    results = [rig.run(value) for value in (1, 2, 3, 4)]
    assert results == [2, 4, 6, 8]
    assert (rig.backend.captured, rig.steps.num_replays, rig.steps.num_graphs) == (1, 2, 1)
    assert rig.prepared == [1, 2, 3, 4]


def test_a_graph_that_computes_something_else_is_given_up(caplog: pytest.LogCaptureFixture):
    rig = _Rig(_Backend(flaw=1e-6))
    with caplog.at_level(logging.WARNING):
        assert [rig.run(value) for value in (1, 2, 3)] == [2, 4, 6]
    assert (rig.steps.num_replays, rig.steps.num_graphs, rig.backend.captured) == (0, 0, 1)
    assert "one runs without a graph: a replay computed something else" in caplog.text


@pytest.mark.parametrize("error", [NotCapturable("item"), RuntimeError("broken")])
def test_a_shape_that_cannot_be_captured_is_tried_once(error: Exception, caplog: pytest.LogCaptureFixture):
    rig = _Rig(_Backend(error=error))
    with caplog.at_level(logging.INFO):
        assert [rig.run(value) for value in (1, 2, 3)] == [2, 4, 6]
    assert (rig.backend.captured, rig.computed) == (1, 3)
    assert caplog.text.count(f"one runs without a graph: {error}") == 1


def test_shapes_beyond_the_limit_run_without_graphs():
    rig = _Rig(_Backend(), most_graphs=2)
    for value, shape in enumerate("abcabcabc"):
        assert rig.run(value, shape) == 2 * value
    assert (rig.steps.num_graphs, rig.steps.num_replays) == (2, 2)


def test_a_shape_that_needs_too_much_memory_runs_without_a_graph():
    rig = _Rig(_Backend())
    assert [rig.run(value, "large") for value in (1, 2, 3)] == [2, 4, 6]
    assert rig.backend.captured == 0
