"""Plans of rows at a given context, without K and V of their past, for timing a step.

The worker believes the core about positions, so a row may start at its last token. Its pages keep what the pool
contains.
"""

import random
from dataclasses import dataclass, field

from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from tests.gpu_worker.plans import TinyCore


def decode_plans(geometry: Geometry, *, rows: int, context: int, steps: int, generation: int = 1) -> list[pb.StepPlan]:
    """`steps` plans in which `rows` rows decode; in the first each sees `context` positions, its own included."""
    core = _core(geometry, generation)
    for row in range(1, rows + 1):
        core.add(row, [row % geometry.vocab_size] * context, position=context - 1)
    return [core.plan(decode=range(1, rows + 1)) for _ in range(steps)]


def prefill_plan(geometry: Geometry, *, lengths: list[int], generation: int = 1) -> pb.StepPlan:
    """One plan with a whole prompt for each length."""
    core = _core(geometry, generation)
    for row, length in enumerate(lengths, start=1):
        core.add(row, [row % geometry.vocab_size] * length)
    return core.plan(chunks=dict(enumerate(lengths, start=1)))


def _core(geometry: Geometry, generation: int) -> TinyCore:
    pages = list(range(1, geometry.num_pages))
    # A busy pool's pages are in no order.
    random.Random(0).shuffle(pages)
    return TinyCore(geometry, generation=generation, page_order=pages)


@dataclass(kw_only=True)
class Generations:
    """Numbers for plans of one runner, which takes only newer generations."""

    last: int = field(default=0)

    def next(self) -> int:
        self.last += 1
        return self.last
