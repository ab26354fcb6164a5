"""The captured steps of a worker, by shape: on a GPU captured at its start, on a CPU while it serves.

On a CPU steps are proven before they are used. The first step of a shape is captured as it runs. At the second one the
graph is replayed beside an ordinary run with other inputs: if a bit differs, because Python computed something that the
graph has as a constant, the shape stays without a graph. From the third one on the graph is replayed.
"""

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gpu_worker.failures import first_line
from gpu_worker.graphs.backend import Graph, GraphBackend, NotCapturable, Result
from gpu_worker.graphs.cpu import cpu_graphs
from gpu_worker.graphs.cuda import CudaGraphs
from gpu_worker.native.library import native_library
from gpu_worker.settings import WorkerSettings
from gpu_worker.trees import leaves

log = logging.getLogger(__name__)


class CapturedSteps(Generic[Result]):
    """Graphs by shape. Without a backend there are none."""

    def __init__(self, backend: GraphBackend | None) -> None:
        self._backend = backend
        self._graphs: dict[Hashable, tuple[Graph, Result]] = {}
        # Time of all captures.
        self.seconds = 0.0

    @property
    def num_graphs(self) -> int:
        """Captured shapes."""
        return len(self._graphs)

    @property
    def pool_bytes(self) -> int:
        """Device memory of all graphs."""
        return 0 if self._backend is None else self._backend.pool_bytes

    @property
    def is_enabled(self) -> bool:
        """Whether shapes can be captured."""
        return self._backend is not None

    def capture(self, shape: Hashable, run: Callable[[], Result]) -> None:
        """Captures `run`, which was called before for this shape. If it cannot be captured, the shape stays without a
        graph, and the log says why."""
        assert self._backend is not None
        begun = time.perf_counter()
        try:
            self._graphs[shape] = self._backend.capture(run)
        except NotCapturable as error:
            log.warning("%s runs without a graph: %s", shape, error)
        self.seconds += time.perf_counter() - begun

    def replay(self, shape: Hashable) -> Result | None:
        """Enqueues the captured work of a shape. Returns its results, which the next replay overwrites; None if the
        shape has no graph."""
        captured = self._graphs.get(shape)
        if captured is None:
            return None
        graph, result = captured
        graph.replay()
        return result


Shape = TypeVar("Shape", bound=Hashable)
Inputs = TypeVar("Inputs")


@dataclass(slots=True, kw_only=True)
class _Captured(Generic[Result]):
    graph: Graph
    # Overwritten by each replay.
    result: Result
    is_proven: bool = False


class ProvenSteps(Generic[Shape, Inputs, Result]):
    """Runs steps, by graphs where it has them."""

    def __init__(
        self,
        backend: GraphBackend,
        *,
        compute: Callable[[Inputs], Result],
        prepare: Callable[[Inputs], None],
        captures: Callable[[Shape], bool],
        most_graphs: int,
    ) -> None:
        """compute: runs a step. prepare: does the part of it that is not captured. captures: whether a shape is
        captured; only the first `most_graphs` shapes are."""
        self._backend, self._compute, self._prepare = backend, compute, prepare
        self._captures, self._most_graphs = captures, most_graphs
        # None: the steps of this shape run without a graph.
        self._captured: dict[Shape, _Captured[Result] | None] = {}
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        """Captured shapes."""
        return sum(captured is not None for captured in self._captured.values())

    @property
    def pool_bytes(self) -> int:
        """Memory of all graphs."""
        return self._backend.pool_bytes

    def run(self, shape: Shape, inputs: Inputs) -> Result:
        """Returns the results of a step, which the next call overwrites. Inputs of one shape are in the same memory."""
        captured = self._captured.get(shape)
        if captured is None:
            if shape in self._captured or self.num_graphs >= self._most_graphs or not self._captures(shape):
                return self._compute(inputs)
            return self._capture(shape, inputs)
        if not captured.is_proven:
            return self._prove(shape, captured, inputs)
        self._prepare(inputs)
        captured.graph.replay()
        self.num_replays += 1
        return captured.result

    def _capture(self, shape: Shape, inputs: Inputs) -> Result:
        # Nothing stays half captured, whatever happens.
        self._captured[shape] = None
        self._prepare(inputs)
        try:
            graph, result = self._backend.capture(lambda: self._compute(inputs))
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
        if all(_has_equal_bits(*each) for each in zip(leaves(result), leaves(captured.result), strict=True)):
            captured.is_proven = True
        else:
            log.warning("%s runs without a graph: a replay computed something else", shape)
            self._captured[shape] = None
        return result


def _has_equal_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def captures_steps(settings: WorkerSettings, device: torch.device) -> bool:
    """Whether this device captures steps. On a CPU without C++ kernels a graph would save nothing."""
    if settings.graphs == "off":
        return False
    return device.type == "cuda" or (device.type == "cpu" and native_library() is not None)


def graphs_for(settings: WorkerSettings, device: torch.device) -> GraphBackend | None:
    """What captures steps on this device; None if they are not captured."""
    if not captures_steps(settings, device):
        return None
    return CudaGraphs(device) if device.type == "cuda" else cpu_graphs()
