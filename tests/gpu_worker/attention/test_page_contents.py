"""Contents of pages in every layer: copied to other pages, to host memory and back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.attention.host_pages import HostPages, Passing
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionPattern
from tests.gpu_worker.attention.small_layers import KIND, layers_of

NUM_PAGES, PAGE_SIZE = 12, 16
NOTHING = np.zeros(0, np.int64)
# Different head sizes, padding, and a pool with the additional page of learned sinks.
LAYERS = layers_of(
    KIND,
    replace(KIND, num_heads=6, num_kv_heads=3, key_dim=24, value_dim=8),
    replace(KIND, pattern=AttentionPattern(window=5, has_learned_sinks=True)),
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def cache(request: pytest.FixtureRequest, device: torch.device) -> KvCache:
    """Fills the pool with different numbers, as far as the dtype distinguishes them."""
    made = KvCache(LAYERS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=request.param, device=device)
    draw = torch.Generator().manual_seed(1)
    for pool in made.pools:
        pool.copy_(torch.randn(pool.shape, generator=draw))
    return made


def page(pool: Tensor, number: int, count: int = PAGE_SIZE) -> Tensor:
    return pool[:, number * PAGE_SIZE : number * PAGE_SIZE + count]


def on(cache: KvCache, values: list[int]) -> Tensor:
    return torch.tensor(values, device=cache.keys[0].device)


def test_copies_take_the_first_tokens_and_clear_the_rest(cache: KvCache) -> None:
    """One source may have several targets; other pages stay; a target's former contents, NaN included, are gone."""
    before = [pool.clone() for pool in cache.pools]
    copies = [(3, 5, 1), (3, 11, PAGE_SIZE - 1), (2, 1, PAGE_SIZE), (4, 8, 7)]
    targets = [target for _, target, _ in copies]
    for pool in cache.pools:
        for target in targets:
            page(pool, target).fill_(torch.nan)
    cache.copy_pages(*(on(cache, list(column)) for column in zip(*copies, strict=True)))
    for pool, old in zip(cache.pools, before, strict=True):
        for source, target, count in copies:
            assert torch.equal(page(pool, target, count), page(old, source, count))
            assert not page(pool, target)[:, count:].any()
        others = [number for number in range(pool.shape[1] // PAGE_SIZE) if number not in targets]
        assert all(torch.equal(page(pool, number), page(old, number)) for number in others)


@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_saved_pages_are_loaded_into_other_pages_bit_by_bit(cache: KvCache, at_once: int, num_buffers: int) -> None:
    """Pages survive in any number at once, in runs of slots or scattered, NaN included."""
    host = HostPages(cache, 9, passing=Passing(num_buffers=num_buffers, pages_at_once=at_once))
    cache.keys[1][:, 2 * PAGE_SIZE] = torch.nan
    before = [pool.clone() for pool in cache.pools]
    saved, slots = [7, 2, 11, 1, 4], np.array([3, 4, 5, 8, 0], np.int32)
    host.save(on(cache, saved), slots)
    for pool in cache.pools:
        pool.zero_()
    # Each page returns to a different page, with the slots in another order.
    order, loaded = [3, 0, 4, 2, 1], [9, 10, 2, 1, 7]
    num_fetched = host.fetch(slots[order], NOTHING)
    assert num_fetched == min(num_buffers, -(-len(loaded) // at_once))
    host.load(on(cache, loaded), slots[order], num_fetched)
    for pool, old in zip(cache.pools, before, strict=True):
        for target, source in zip(loaded, (saved[i] for i in order), strict=True):
            assert torch.equal(page(pool, target).view(torch.uint8), page(old, source).view(torch.uint8))
        others = [number for number in range(pool.shape[1] // PAGE_SIZE) if number not in loaded]
        assert not any(page(pool, number).any() for number in others)


def test_a_save_replaces_the_contents_of_a_host_page(cache: KvCache) -> None:
    host = HostPages(cache, 2)
    for number in (3, 4):
        host.save(on(cache, [number]), np.array([1], np.int32))
    host.load(on(cache, [5, 6]), np.array([1, 0], np.int32))
    for pool in cache.pools:
        assert torch.equal(page(pool, 5), page(pool, 4))
        assert not page(pool, 6).any()


def test_a_fetch_takes_no_host_page_that_its_plan_saves(cache: KvCache) -> None:
    """It ends before the first passage with such a page, so that the load finds the new contents."""
    host = HostPages(cache, 6, passing=Passing(num_buffers=4, pages_at_once=2))
    host.save(on(cache, [1, 2, 3, 4, 5, 6]), np.arange(6))
    saved, slots = np.array([3]), np.array([5, 0, 1, 3, 4, 2])
    num_fetched = host.fetch(slots, saved)
    assert num_fetched == 1
    host.save(on(cache, [7]), saved)
    host.load(on(cache, [11, 10, 9, 8, 2, 1]), slots, num_fetched)
    for pool in cache.pools:
        assert torch.equal(page(pool, 8), page(pool, 7))
        assert torch.equal(page(pool, 11), page(pool, 6))


def test_a_cache_without_host_pages_saves_and_loads_nothing(cache: KvCache) -> None:
    assert HostPages(cache, 0).pages.nbytes == 0
