"""Work that cannot be captured stays without a graph, and leaves the captures after it as they were.

On a CPU a state machine stands for torch's allocator and for the driver; with `--device cuda` both are real.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gpu_worker.cuda import graphs
from gpu_worker.cuda.graphs import CudaGraphs
from gpu_worker.graphs import NotCapturable


class FakeCuda:
    """What `CudaGraphs` uses of torch: `CUDAGraph::capture_end` leaves its pool only if the driver ends the capture."""

    def __init__(self) -> None:
        self.mode, self.is_capturing, self.is_valid = "default", False, True
        self.num_pools, self.recording = 0, set[int]()
        self.CUDAGraph = lambda: FakeGraph(self)
        self.synchronize, self.current_device = lambda device: None, lambda: 0
        self.memory_reserved = lambda device: 0
        self._C = SimpleNamespace(_cuda_endAllocateToPool=self.leave, _cuda_releasePool=lambda device, pool: None)
        self.device, self.cuda = torch.device, self

    def Stream(self, device: torch.device) -> object:
        return object()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def graph_pool_handle(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def get_sync_debug_mode(self) -> str:
        return self.mode

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    def leave(self, device: int, pool: int) -> None:
        self.recording.discard(pool)

    def wait(self, *, is_known: bool) -> None:
        if is_known and self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.is_capturing:
            self.is_valid = False
            raise RuntimeError("operation not permitted when stream is capturing")


class FakeGraph:
    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        if pool in self._fake.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._fake.recording.add(pool)
        self._pool, self._fake.is_capturing, self._fake.is_valid = pool, True, True

    def capture_end(self) -> None:
        self._fake.is_capturing = False
        if not self._fake.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._fake.leave(0, self._pool)

    def replay(self) -> None:
        pass


@pytest.fixture
def wait(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Waits for the device: by an operator that torch knows to wait, or by another one."""
    if device.type == "cuda":
        return lambda *, is_known: torch.ones(1, device=device).item() if is_known else torch.cuda.synchronize()
    fake = FakeCuda()
    monkeypatch.setattr(graphs, "torch", fake)
    monkeypatch.setattr(graphs, "unowned", lambda tensor: tensor)
    return fake.wait


@pytest.mark.parametrize("is_known", [True, False], ids=["seen before", "the driver invalidates"])
def test_work_that_waits_is_refused_and_later_work_is_captured(
    device: torch.device, wait: Callable[..., None], is_known: bool
) -> None:
    backend = CudaGraphs(torch.device("cuda", 0))
    place = torch.zeros(4, device=device)
    kept = [backend.capture(lambda: place.add_(1))]
    for _ in range(2):
        with pytest.raises(NotCapturable):
            backend.capture(lambda: wait(is_known=is_known))
        kept.append(backend.capture(lambda: place.add_(1)))
    for graph, _ in kept:
        graph.replay()
    assert bool(place.gt(0).all())


def test_work_that_raises_is_refused_and_later_work_is_captured(
    device: torch.device, wait: Callable[..., None]
) -> None:
    backend, calls = CudaGraphs(torch.device("cuda", 0)), list[int]()
    place = torch.zeros(4, device=device)

    def run() -> None:
        place.add_(1)
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no kernel for this shape")

    with pytest.raises(NotCapturable, match="no kernel for this shape"):
        backend.capture(run)
    graph, _ = backend.capture(lambda: place.add_(1))
    graph.replay()
