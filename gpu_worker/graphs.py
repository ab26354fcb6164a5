"""How device work is captured and replayed: as CUDA graphs, as recorded calls on a CPU, in tests by a recorder."""

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")
Captured = TypeVar("Captured")


class NotCapturable(RuntimeError):
    """The work contains an operation that cannot be captured; the message names it."""


class Graph(Protocol):
    """Captured device work. It reads and writes the same memory at each replay."""

    def replay(self) -> None:
        """Enqueues the work on the current stream."""


class GraphBackend(Protocol):
    """Captures device work."""

    @property
    def pool_bytes(self) -> int:
        """Memory of all graphs."""
        ...

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """Captures the device work of `run`. Tensors in its result are overwritten by each replay.

        Requires that `run` was called before, so that its kernels are compiled. Raises NotCapturable.
        """
        ...


class Captures(Generic[Captured]):
    """The graphs of a worker's steps. Without a backend there are none."""

    def __init__(self, backend: GraphBackend | None) -> None:
        self._backend = backend
        # By shape. None: the steps of this shape run without a graph.
        self._captured: dict[Hashable, Captured | None] = {}

    @property
    def num_graphs(self) -> int:
        """Captured shapes."""
        return sum(captured is not None for captured in self._captured.values())

    @property
    def is_enabled(self) -> bool:
        return self._backend is not None

    @property
    def pool_bytes(self) -> int:
        return 0 if self._backend is None else self._backend.pool_bytes
