"""The captured steps of a worker, by shape."""

import logging
import time
from collections.abc import Callable, Hashable
from typing import Generic

from gpu_worker.graphs.backend import Graph, GraphBackend, NotCapturable, Result

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
