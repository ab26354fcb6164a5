"""Checksums on a device equal those of a CPU, for every layout of the pool, and do not wait."""

import pytest
import torch
from torch import Tensor

from gpu_worker.shared_pool.guard import PAGES_AT_ONCE, TorchChecksums, checksums_of, words_of

PAGE = 16


def pools_of(shapes: list[tuple[int, int, int]], dtype: torch.dtype, *, in_one: bool) -> list[Tensor]:
    """Random pools, in one block of memory or each in its own."""
    generator = torch.Generator().manual_seed(1)
    sizes = [heads * tokens * dim for heads, tokens, dim in shapes]
    block = torch.randn(sum(sizes), generator=generator).to(dtype)
    parts = block.split(sizes)
    return [(part if in_one else part.clone()).view(shape) for part, shape in zip(parts, shapes, strict=True)]


CASES = {
    "equal": [(2, 9 * PAGE, 64)] * 6,
    "kinds": [(2, 9 * PAGE, 64), (2, 9 * PAGE, 64), (1, 9 * PAGE, 128), (1, 9 * PAGE, 128), (2, 9 * PAGE, 64)],
    "sinks": [(4, 10 * PAGE, 16)] * 2 + [(4, 9 * PAGE, 16)] * 2,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_one", [True, False])
def test_they_are_those_of_a_cpu(case: str, dtype: torch.dtype, in_one: bool, device: torch.device) -> None:
    pools = pools_of(CASES[case], dtype, in_one=in_one)
    truth = checksums_of(words_of(pools, PAGE))
    # Words have the addresses of the pools, and do not keep them.
    on_device = [pool.to(device) for pool in pools] if device.type == "cuda" else pools
    ours = TorchChecksums(words_of(on_device, PAGE))
    pages = [0, 8, 3, 3, 5, 1, 7, 2, 6][: 2 * PAGES_AT_ONCE + 1]
    assert ours.of(pages) == truth.of(pages)
    # Results of steps in flight are read later, in any order.
    first, second = ours.begin(pages[:2]), ours.begin(pages[2:])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert second() == truth.of(pages[2:])
    assert first() == truth.of(pages[:2])


def test_pools_at_equal_distances_are_read_together() -> None:
    one = pools_of(CASES["equal"], torch.float32, in_one=True)
    # As the worker lists them: K of all layers, then V.
    listed = [*one[::2], *one[1::2]]
    assert [group.shape[0] for group in words_of(listed, PAGE)] == [3, 3]
    assert [group.shape[0] for group in words_of(one, PAGE)] == [6]
    truth = checksums_of(words_of(listed, PAGE))
    assert TorchChecksums(words_of(listed, PAGE)).of([4]) == truth.of([4])
