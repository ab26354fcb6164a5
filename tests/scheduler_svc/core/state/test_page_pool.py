"""The page pool against plain lists and dicts: counts, eviction order, removal from the middle, the cache index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.pages.page_pool import PagePool

TOKENS = b"tokens"


def cached(pool: PagePool, count: int, first_hash: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    for i, page in enumerate(pages):
        assert pool.cache(page, bytes([first_hash + i]), TOKENS)
    return pages


def test_the_free_list_has_uncached_pages_first_then_the_least_recently_released() -> None:
    pool = PagePool(8)
    first, second, uncached = cached(pool, 2, 0), cached(pool, 3, 10), pool.allocate(2)
    assert uncached is not None
    pool.release(second)
    pool.release(first)
    pool.release(uncached)
    assert pool.free_pages() == [6, 7, 5, 4, 3, 2, 1]
    assert (pool.num_unused, pool.num_evictable, pool.num_used) == (7, 5, 0)


def test_pages_are_unverified_from_their_allocation_on() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert pages is not None
    assert pool.take_unverified(pages) == []
    pool.mark_verified(2)
    pool.release(pages)
    again = pool.allocate(3)
    assert again is not None
    assert pool.take_unverified(again) == [1]


def test_releasing_an_unused_page_raises() -> None:
    with pytest.raises(AssertionError, match="page 1 has no reference"):
        PagePool(3).release([1])


def test_a_pool_of_one_page_raises() -> None:
    with pytest.raises(ValueError, match="num_pages is 1; a pool needs at least 2"):
        PagePool(1)


_OPERATIONS = st.sampled_from(["allocate", "release", "share", "cache", "evict", "evict all"])


@given(st.lists(st.tuples(_OPERATIONS, st.integers(0, 9)), max_size=80))
def test_the_page_pool_behaves_like_plain_lists(operations: list[tuple[str, int]]) -> None:
    pool, unused, held = PagePool(8), list(range(1, 8)), list[int]()
    hashes: dict[int, bytes] = {}
    for what, number in operations:
        page = 1 + number % 7
        if what == "allocate":
            count = number % 4
            pages = pool.allocate(count)
            assert pages == (unused[:count] if count <= len(unused) else None)
            if pages is not None:
                unused = unused[count:]
                held += pages
                for taken in pages:
                    hashes.pop(taken, None)
        elif what == "release" and held:
            page = held.pop(number % len(held))
            pool.release([page])
            if page not in held:
                unused.insert(len(unused) if page in hashes else 0, page)
        elif what == "share":
            pool.share(page)
            held.append(page)
            if page in unused:
                unused.remove(page)
        elif what == "cache" and page in held:
            page_hash = bytes([number // 2])
            is_new = page not in hashes and page_hash not in hashes.values()
            assert pool.cache(page, page_hash, TOKENS) is is_new
            if is_new:
                hashes[page] = page_hash
        elif what == "evict":
            pool.evict(page)
            hashes.pop(page, None)
        elif what == "evict all" and number == 0:
            assert pool.evict_all() == len(hashes)
            hashes = {}
        assert pool.free_pages() == unused
        assert (pool.num_unused, pool.num_evictable) == (len(unused), sum(page in hashes for page in unused))
        assert all(pool.references(page) == held.count(page) for page in range(1, 8))
        assert all(pool.hash_of(page) == hashes.get(page) for page in range(1, 8))
        for page_hash in (bytes([number]) for number in range(5)):
            page = next((page for page, own in hashes.items() if own == page_hash), 0)
            assert pool.find(page_hash, TOKENS) == pool.page_with_hash(page_hash) == page
            assert pool.find(page_hash, b"others") == 0
