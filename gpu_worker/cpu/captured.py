"""The captured steps of a CPU, by shape. They are captured while it serves, and proven before they are used.

The first step of a shape is captured as it runs. At the second one the graph is replayed beside an ordinary run with
other inputs: if a bit differs, because Python computed something that the graph has as a constant, the shape stays
without a graph. From the third one on the graph is replayed.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gpu_worker.failures import first_line
from gpu_worker.graphs import Captures, Graph, GraphBackend, NotCapturable, Result
from gpu_worker.trees import leaves

log = logging.getLogger(__name__)

Shape = TypeVar("Shape", bound=Hashable)
Inputs = TypeVar("Inputs")


@dataclass(slots=True, kw_only=True)
class _Captured(Generic[Result]):
    graph: Graph
    # Overwritten by each replay.
    result: Result
    is_proven: bool = False


class ProvenSteps(Captures[_Captured[Result]], Generic[Shape, Inputs, Result]):
    """Runs steps, by graphs where it has them."""

    def __init__(
        self,
        backend: GraphBackend | None,
        *,
        compute: Callable[[Inputs], Result],
        prepare: Callable[[Inputs], None],
        captures: Callable[[Shape], bool],
        most_graphs: int,
    ) -> None:
        """backend: None: no step is captured. compute: runs a step. prepare: does the part of it that is not captured.
        captures: whether a shape is captured; only the first `most_graphs` shapes are."""
        super().__init__(backend)
        self._compute, self._prepare = compute, prepare
        self._captures, self._most_graphs = captures, most_graphs
        self.num_replays = 0

    def run(self, shape: Shape, inputs: Inputs) -> Result:
        """Returns the results of a step, which the next call overwrites. Inputs of one shape are in the same memory."""
        if self._backend is None:
            return self._compute(inputs)
        captured = self._captured.get(shape)
        if captured is None:
            if shape in self._captured or self.num_graphs >= self._most_graphs or not self._captures(shape):
                return self._compute(inputs)
            return self._capture(self._backend, shape, inputs)
        if not captured.is_proven:
            return self._prove(shape, captured, inputs)
        self._prepare(inputs)
        captured.graph.replay()
        self.num_replays += 1
        return captured.result

    def _capture(self, backend: GraphBackend, shape: Shape, inputs: Inputs) -> Result:
        # Nothing stays half captured, also after an error.
        self._captured[shape] = None
        self._prepare(inputs)
        try:
            graph, result = backend.capture(lambda: self._compute(inputs))
        except Exception as error:  # if the step itself is at fault, the ordinary run raises it too
            level = logging.INFO if isinstance(error, NotCapturable) else logging.WARNING
            log.log(level, "%s runs without a graph: %s", shape, first_line(error))
            return self._compute(inputs)
        self._captured[shape] = _Captured(graph=graph, result=result)
        return result

    def _prove(self, shape: Shape, captured: _Captured[Result], inputs: Inputs) -> Result:
        result = self._compute(inputs)
        self._prepare(inputs)
        captured.graph.replay()
        if all(_has_equal_bits(*pair) for pair in zip(leaves(result), leaves(captured.result), strict=True)):
            captured.is_proven = True
        else:
            log.warning("%s runs without a graph: a replay computed something else", shape)
            self._captured[shape] = None
        return result


def _has_equal_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
