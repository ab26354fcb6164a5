"""The first pages of a pool: every plan of the worker's own names only these, and their pieces cover them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gpu_worker.compatibility.self_check import make_plans, make_prompts
from gpu_worker.geometry import PAGES_AT_ONCE, Geometry, num_first_pages
from gpu_worker.memory.costs import PoolTensors
from gpu_worker.memory.sizing import bytes_beside_pool
from gpu_worker.shared_pool.device_pool import piece_offsets
from gpu_worker.step.warm_up import full_plan, full_prompts_plan, warm_up_plan
from gpu_worker.wire.frames import Plan
from tests.gpu_worker.memory.test_sizing import COSTS

GRANULE = 2 << 20


def geometry_of(page_size: int, max_length: int, token_budget: int, num_pages: int = 5000) -> Geometry:
    return Geometry(
        page_size=page_size,
        num_pages=num_pages,
        max_rows=min(256, token_budget - 128),
        max_length=max_length,
        token_budget=token_budget,
        chunk_align=128,
        vocab_size=100,
    )


GEOMETRIES = [
    geometry_of(128, 4096, 4096),
    geometry_of(128, 131_072, 8192),
    geometry_of(16, 64, 4096),
    geometry_of(16, 100, 512, num_pages=12),
    geometry_of(256, 300, 2048),
    geometry_of(64, 2, 512),
]


def own_plans(geometry: Geometry) -> Iterator[Plan]:
    """Those of the warm-up, the largest step, the self-check and the timings; the timed copies are of pages 1 to 8."""
    yield warm_up_plan(num_rows=1, chunk=True)
    yield warm_up_plan(num_rows=geometry.max_rows, chunk=False)
    yield full_plan(geometry)
    yield full_prompts_plan(geometry)
    yield from make_plans(make_prompts(geometry), geometry)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_own_plans_name_first_pages_only(geometry: Geometry) -> None:
    started = [plan.started for plan in own_plans(geometry) if plan.started is not None]
    last = max(int(np.concatenate(each.pages).max()) for each in started)
    num_first = num_first_pages(geometry)
    assert last < num_first <= geometry.num_pages
    assert min(8, geometry.num_pages - 1) < num_first


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("extra", [0, 1])
def test_pieces_cover_the_first_pages_of_every_head_and_fit_their_estimate(geometry: Geometry, extra: int) -> None:
    heads, dimension, itemsize = 3, 80, 2
    shape = (heads, (geometry.num_pages + extra) * geometry.page_size, dimension)
    size = -(-np.prod(shape) * itemsize // GRANULE) * GRANULE
    starts = [0, int(size)]
    offsets = piece_offsets([shape] * 2, itemsize, geometry, GRANULE)
    covered = np.zeros(2 * int(size) // GRANULE, np.bool_)
    covered[np.array(offsets) // GRANULE] = True
    page_bytes = geometry.page_size * dimension * itemsize
    for start in starts:
        for head in range(heads):
            first = start + head * shape[1] * dimension * itemsize
            used = [(first, first + num_first_pages(geometry) * page_bytes)]
            used += [(first + geometry.num_pages * page_bytes, first + (geometry.num_pages + 1) * page_bytes)] * extra
            for begin, end in used:
                assert covered[begin // GRANULE : -(-end // GRANULE)].all()
        # Torch asks for the owner of the address where a tensor begins.
        assert covered[start // GRANULE]
    tensors = PoolTensors(count=2, heads=heads, head_dim=dimension, itemsize=itemsize, extra_pages=extra)
    beside = bytes_beside_pool(replace(COSTS, pool=(tensors,)), geometry)
    sums = 2 * (PAGES_AT_ONCE + 1) * page_bytes
    assert len(offsets) * GRANULE + sums <= beside
