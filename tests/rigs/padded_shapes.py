"""Shapes of padded steps for a CPU that runs what a GPU does: few, because it compiles an attention kernel in 10 s."""

from gpu_worker.geometry import Geometry
from gpu_worker.layout.shapes import Shapes, StepShape


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
