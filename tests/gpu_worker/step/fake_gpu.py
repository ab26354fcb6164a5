"""Runs a runner on a CPU through its code for GPUs: results in pinned buffers, events, plans in flight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_worker.cuda.staging import ResultRing
from gpu_worker.step.backend import StepTimer
from gpu_worker.step.in_flight import MAX_IN_FLIGHT
from gpu_worker.step.runner import Runner


class Event:
    """Has happened at once. If `fails` returns True, calls that ask raise the error that CUDA reports."""

    def __init__(self, *, fails: Callable[[], bool] = lambda: False) -> None:
        self._fails = fails

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self._fails():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore lines")

    def elapsed_time(self, end: "Event") -> float:
        end.synchronize()
        return 1.5


class Allocations:
    """Ordinary memory for a ResultRing; `sizes` are those of all allocations."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_words: int) -> Tensor:
        self.sizes.append(num_words)
        return torch.full((num_words,), -7, dtype=torch.int64)


def as_on_gpu(runner: Runner, patch: pytest.MonkeyPatch, *, fails: Callable[[], bool] = lambda: False) -> Allocations:
    """Lets steps of a CPU end as a GPU's do. fails: whether the device has failed, asked at each call."""
    allocations, steps = Allocations(), runner.steps
    ring = ResultRing(num_buffers=MAX_IN_FLIGHT + 1, num_tokens=runner.geometry.max_rows, allocate=allocations)
    finish = steps.finish
    patch.setattr(steps, "finish", lambda begun, masks: ring.to_host(finish(begun, masks)))
    patch.setattr(steps, "put_back", ring.put_back)
    patch.setattr(steps, "timer", lambda: StepTimer(Event(fails=fails), Event(fails=fails)))
    patch.setattr(runner.execution, "lost", "")
    return allocations
