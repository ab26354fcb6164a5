"""Shapes of padded steps for a CPU that runs what a GPU does: few, because it compiles an attention kernel in 10 s.

And inputs for a test that lays plans out without a runner.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.arrays import Space
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.views import View
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.cuda.staging import Stream
from gpu_worker.cuda.steps import PaddedSteps
from gpu_worker.geometry import Geometry
from gpu_worker.graphs import GraphBackend
from gpu_worker.layout.step_layout import StepInputs, StepShape, allocated
from gpu_worker.shared_pool.pool import WorkerPool
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.runner import Runner

Place = Callable[[StepShape], tuple[StepShape, StepInputs]]


def placed_in(shapes: Shapes, geometry: Geometry, views: Sequence[View]) -> Place:
    """Returns new inputs for steps that are padded to the shapes, as `lay_out` takes them."""

    def inputs_of(need: StepShape) -> tuple[StepShape, StepInputs]:
        shape = shapes.fitting(need)
        return shape, allocated(shape, geometry, views, Space())

    return inputs_of


def unpadded(geometry: Geometry) -> Place:
    """Returns new inputs for steps of their own sizes."""

    def inputs_of(need: StepShape) -> tuple[StepShape, StepInputs]:
        shape = replace(need, draws=False)
        return shape, allocated(shape, geometry, (), Space())

    return inputs_of


def few_shapes(geometry: Geometry, *decode_buckets: int) -> Shapes:
    """Steps of these numbers of rows, and mixed steps of one size. The last number is that of the geometry."""
    most, prefill = decode_buckets[-1], geometry.prefill_tokens
    decode = [
        StepShape(decode=size, prefill=0, tokens=size, samples=size, draws=draws)
        for size in decode_buckets
        for draws in (False, True)
    ]
    mixed = StepShape(decode=most, prefill=prefill, tokens=most + prefill, samples=most, draws=True)
    return Shapes(decode_buckets=decode_buckets, prefill_buckets=(prefill,), steps=(*decode, mixed))


class HostEvent:
    """In place of a CUDA event: everything before it has ended."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return (end._seconds - self._seconds) * 1e3


class HostStream(Stream):
    """In place of a GPU's stream: work has ended when its call returns."""

    def event(self, *, timed: bool = False) -> Any:
        return HostEvent()

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype)


def padded_runner(
    model: PreTrainedModel,
    layers: LayerMap,
    geometry: Geometry,
    *,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Shapes,
    graphs: GraphBackend | None = None,
    pool: WorkerPool | None = None,
) -> Runner:
    """A runner that does on a CPU, or without data on the meta device, what a worker does on a GPU."""
    # FlexAttention on a CPU requires lists of pages, and so lines of the table, as wide as the pool.
    width = max(geometry.num_pages, geometry.pages_per_row) if device.type == "cpu" else None
    on_device = DeviceModel(model, layers, geometry, device=device, dtype=dtype, memory=pool, table_width=width)
    steps = PaddedSteps(on_device, shapes, HostStream(), graphs=graphs, captures=lambda _: True)
    return Runner(on_device, steps, pool=pool)
