"""The page pool against plain lists and dicts: counts, eviction order, removal from the middle, the cache index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.pages.page_pool import PagePool

TOKENS = b"tokens"


def test_page_zero_is_never_allocated() -> None:
    pool = PagePool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.num_unused == 0


def test_allocate_returns_none_and_changes_nothing_if_too_few_are_unused() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.free_pages() == [1, 2, 3]


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


def test_a_page_is_unused_when_its_last_reference_is_released() -> None:
    pool = PagePool(3)
    assert pool.allocate(1) == [1]
    pool.share(1)
    pool.release([1])
    assert pool.free_pages() == [2]
    pool.release([1])
    assert pool.free_pages() == [1, 2]


def test_a_cached_page_is_found_by_hash_and_tokens_until_it_is_allocated() -> None:
    pool = PagePool(3)
    [page] = cached(pool, 1, 5)
    assert not pool.cache(page, b"another", TOKENS), "it is cached already"
    pool.release([page])
    assert pool.find(bytes([5]), TOKENS) == page
    assert pool.find(bytes([5]), b"others") == 0
    pool.share(page)
    assert (pool.num_evictable, pool.num_cached) == (0, 1)
    pool.release([page])
    assert pool.allocate(2) == [2, page]
    assert pool.find(bytes([5]), TOKENS) == 0
    assert pool.hash_of(page) is None


def test_an_evicted_page_keeps_its_references() -> None:
    pool = PagePool(3)
    [page] = cached(pool, 1, 5)
    pool.evict(page)
    assert (pool.page_with_hash(bytes([5])), pool.references(page)) == (0, 1)
    pool.release([page])
    assert pool.num_evictable == 0
    assert pool.evict_all() == 0


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


_OPERATIONS = st.sampled_from(["allocate", "release", "share", "cache", "evict"])


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
        assert pool.free_pages() == unused
        assert (pool.num_unused, pool.num_evictable) == (len(unused), sum(page in hashes for page in unused))
        assert all(pool.references(page) == held.count(page) for page in range(1, 8))
        assert all(pool.hash_of(page) == hashes.get(page) for page in range(1, 8))
        assert all(pool.find(page_hash, TOKENS) == page for page, page_hash in hashes.items())
