"""Shapes of padded steps for a CPU that runs what a GPU does: few, because it compiles an attention kernel in 10 s.

And inputs for a test that lays plans out without a runner.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpu_worker.arrays import Space
from gpu_worker.attention.views import View
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry
from gpu_worker.layout.shapes import StepShape
from gpu_worker.layout.step_layout import StepInputs, allocated

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
