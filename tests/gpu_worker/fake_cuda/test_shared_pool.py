"""Steps with a pool that outlives its worker, on a CUDA device without a GPU: nothing waits, few launches are added."""

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gpu_worker.attention.layers import LayerMap
from gpu_worker.shared_pool import device_pool, pool
from gpu_worker.shared_pool.cuda_driver import Driver
from gpu_worker.shared_pool.device_pool import DevicePool
from tests.gpu_worker.cuda_memory.fake_libcuda import FakeCard, FakeLibcuda
from tests.gpu_worker.fake_cuda.fake_device import CUDA, FakeCuda
from tests.gpu_worker.fake_cuda.rig import GEOMETRY, FakeRig
from tests.gpu_worker.fake_cuda.test_fake_cuda import TO_DEVICE, TO_HOST
from tests.gpu_worker.fake_cuda.trace import launches
from tests.gpu_worker.shared_pool.fake_holder import FakeHolder

PAGE = GEOMETRY.page_size
# Launches of the checksums of some pages: a sum for each, and for every four of them a product and a sum; at the end
# the sum of all parts, and the copy. Here K and V of each layer are groups of their own.
GROUPS, FIXED = 4, 2


@pytest.fixture(scope="module")
def rig() -> Iterator[FakeRig]:
    """A runner; its pool has addresses of the fake driver, and tensors without data."""

    def no_bytes(address: int, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def words_of(pools: Sequence[Tensor], page_size: int) -> list[Tensor]:
        return [pool.view(pool.shape[0], -1, page_size * pool.shape[2]).view(torch.int64)[None] for pool in pools]

    library, holder = FakeLibcuda(FakeCard(is_dirty=False)), FakeHolder()

    def pool_of(layers: LayerMap) -> DevicePool:
        own = {"identity": "model", "device": CUDA, "is_whole": True}
        return DevicePool(holder, Driver(library, 0), layers, GEOMETRY, torch.bfloat16, **own)  # type: ignore[arg-type]

    with (
        patch.object(pool, "bytes_at", no_bytes),
        patch.object(device_pool, "bytes_at", no_bytes),
        patch.object(pool, "words_of", words_of),
    ):
        yield FakeRig(FakeCuda(), pool_of)
    holder.close()
    library.end()


def test_steps_do_not_wait_for_checksums(rig: FakeRig) -> None:
    core = rig.core({1: PAGE - 2, 2: PAGE - 2, 3: 20})
    # Rows start in the first step.
    _, usual = (rig.step(core, decode=[1, 2, 3]) for _ in range(2))
    assert usual.crossings == [TO_DEVICE, TO_HOST]
    # Rows 1 and 2 fill their first page.
    filling = rig.step(core, decode=[1, 2, 3])
    assert filling.crossings == [TO_DEVICE, TO_HOST, TO_HOST]
    added = len(launches(filling.operators)) - len(launches(usual.operators))
    assert added == GROUPS * (2 + 2) + FIXED
    pool = rig.runner.pool
    assert isinstance(pool, DevicePool)
    filled = [page for page, stamp in enumerate(pool._header.filled_by) if stamp]
    assert filled == [core.rows[1].pages[0], core.rows[2].pages[0]]
    # The first of these gives rows 1 and 2 another page.
    _, after = (rig.step(core, decode=[1, 2, 3]) for _ in range(2))
    assert after.crossings == [TO_DEVICE, TO_HOST]
    assert len(launches(after.operators)) == len(launches(usual.operators))
