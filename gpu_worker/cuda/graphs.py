"""The captured steps of a GPU, by shape, and their capture as CUDA graphs, all in one memory pool.

A graph keeps no reference to its results: a later capture may use the same memory of the pool, which is what makes one
pool as small as its largest graph. Results are valid from a replay to the next one.
"""

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from gpu_worker.failures import first_line
from gpu_worker.graphs import Captures, Graph, GraphBackend, NotCapturable, Result
from gpu_worker.process.starting import without_collections
from gpu_worker.shared_pool.cuda_region import bytes_at
from gpu_worker.trees import mapped

log = logging.getLogger(__name__)


class CapturedSteps(Captures[tuple[Graph, Result]]):
    """Graphs by shape."""

    def __init__(self, backend: GraphBackend | None) -> None:
        super().__init__(backend)
        # Time of all captures.
        self.seconds = 0.0

    def capture(self, shape: Hashable, run: Callable[[], Result]) -> None:
        """Captures `run`, which was called before for this shape. If it cannot be captured, the shape stays without a
        graph, and the log says why."""
        assert self._backend is not None
        begun = time.perf_counter()
        try:
            self._captured[shape] = self._backend.capture(run)
        except NotCapturable as error:
            log.warning("%s runs without a graph: %s", shape, error)
        self.seconds += time.perf_counter() - begun

    def replay(self, shape: Hashable) -> Result | None:
        """Enqueues the captured work of a shape. Returns its results, which the next replay overwrites; None if the
        shape has no graph."""
        captured = self._captured.get(shape)
        if captured is None:
            return None
        graph, result = captured
        graph.replay()
        return result


class CudaGraphs:
    """Captures on a stream of its own and replays on the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: the allocator keeps the pool's blocks by stream.
        self._stream = torch.cuda.Stream(device)
        self.pool_bytes = 0

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        try:
            # In a capture a wait for the device would be an error of the driver.
            with waits_raise():
                run()
        except RuntimeError as error:
            raise NotCapturable(first_line(error)) from error
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would also empty the allocator's cache at every capture. A collection of garbage would end
        # tensors and events of reference cycles, which is not allowed meanwhile.
        with torch.cuda.stream(self._stream), without_collections(freezes=False):
            try:
                # Other threads, such as the one that pins memory, may use CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = run()
            except RuntimeError as error:
                self._abandon(graph)
                raise NotCapturable(first_line(error)) from error
            graph.capture_end()
        self.pool_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph, mapped(result, unowned)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed, and leaves its pool to the graphs that it has; later ones get another.

        If the driver has invalidated the capture, `capture_end` raises before the allocator has left the pool, and each
        later capture into it would fail (torch 2.11 to 2.13, `CUDAGraph::capture_end`). A pool without graphs is gone.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                torch._C._cuda_releasePool(self._device.index, self._pool)
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)


@contextmanager
def waits_raise() -> Iterator[None]:
    """Has torch raise RuntimeError for operators that wait for the device, those that it knows."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it does not know them all.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def unowned(tensor: Tensor) -> Tensor:
    """A tensor on the same memory that does not keep it allocated. Raises NotCapturable if it is not contiguous."""
    if not tensor.is_contiguous():
        raise NotCapturable(f"a result of shape {list(tensor.shape)} is not contiguous")
    return bytes_at(tensor.data_ptr(), tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
