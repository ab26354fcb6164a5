"""The static shapes of padded steps and of their kernels.

Every step is padded to one of a few shapes, so that steps of equal shape are the same operators on the same memory,
which a CUDA graph can replay.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from gpu_worker.geometry import Geometry, align_up
from gpu_worker.layout.step_layout import MAX_SHAPES, StepShape

_LEAST_PREFILL_BUCKET = 512
_MAX_PREFILL_BUCKETS = 6
# Decode buckets in steps of 16 up to this size, and this number of larger ones at most.
_SMALL_DECODE = 64
_NUM_LARGE_DECODE = 6
_LARGE_DECODE_STEP = 32
_tokens = attrgetter("tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes for which kernels exist."""

    # Attention slots of each decode kernel, ascending.
    decode_buckets: tuple[int, ...]
    # Query positions of each prefill kernel, ascending; the last holds the token budget.
    prefill_buckets: tuple[int, ...]
    # The shapes of all steps, cheapest first, without prompt logits.
    steps: tuple[StepShape, ...]

    @classmethod
    def of(cls, geometry: Geometry) -> "Shapes":
        """Returns buckets, and the shapes of steps made of them."""
        decode, prefill = _decode_buckets(geometry.max_rows), _prefill_buckets(geometry)
        shapes = [
            StepShape(decode=size, prefill=0, tokens=size, samples=size, draws=draws)
            for size in decode
            for draws in (False, True)
        ]
        few, most = next(size for size in decode if size >= min(_SMALL_DECODE, geometry.max_rows)), decode[-1]
        # Chunks shorter than the query tile have far fewer tokens than query positions: the last shapes are for them.
        mixed = [
            *((rows, size, size) for size in prefill for rows in dict.fromkeys((few, most))),
            *((most, prefill[-1], size) for size in prefill[:-1]),
        ]
        shapes += [
            StepShape(decode=rows, prefill=queries, tokens=rows + tokens, samples=most, draws=True)
            for rows, queries, tokens in mixed[: MAX_SHAPES - len(shapes)]
        ]
        shapes.sort(key=lambda shape: (shape.tokens, shape.prefill, shape.samples, shape.draws))
        return cls(decode_buckets=decode, prefill_buckets=prefill, steps=tuple(shapes))

    def fitting(self, need: StepShape) -> StepShape:
        """Returns the cheapest shape that holds a step; `need` has the step's own sizes."""
        first = bisect_left(self.steps, need.tokens, key=_tokens)
        return next(shape for shape in islice(self.steps, first, None) if _holds(shape, need))


def _holds(shape: StepShape, need: StepShape) -> bool:
    """Whether a step of the sizes `need` can be padded to the shape."""
    return (
        shape.decode >= need.decode
        and shape.prefill >= need.prefill
        and shape.tokens - shape.decode >= need.tokens - need.decode
        and shape.samples >= need.samples
        and shape.draws >= need.draws
    )


def _decode_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 48, 64, then equal steps (96, 128, 160 … for 256 rows), and exactly max_rows."""
    step = align_up(-(-(max_rows - _SMALL_DECODE) // _NUM_LARGE_DECODE), _LARGE_DECODE_STEP)
    large = range(_SMALL_DECODE + step, max_rows, step) if max_rows > _SMALL_DECODE else ()
    return (*(size for size in (1, 2, 4, 8, 16, 32, 48, _SMALL_DECODE, *large) if size < max_rows), max_rows)


def _prefill_buckets(geometry: Geometry) -> tuple[int, ...]:
    """Powers of two, and exactly the token budget."""
    most = geometry.prefill_tokens
    powers = [1 << i for i in range(most.bit_length()) if _LEAST_PREFILL_BUCKET <= 1 << i < most]
    aligned = [size for size in powers if size % geometry.chunk_align == 0]
    return (*aligned[-(_MAX_PREFILL_BUCKETS - 1) :], most)
