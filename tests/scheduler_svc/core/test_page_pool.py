"""The pool against a plain list: counts, order of eviction, removal from the middle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.page_pool import PagePool


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.num_free == 0


def test_too_few_is_a_result_and_changes_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.free_pages() == [1, 2, 3]


def test_tails_are_evicted_before_heads() -> None:
    pool = PagePool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None
    assert second is not None
    pool.release(first)
    pool.release(second)
    assert pool.free_pages() == [2, 1, 5, 4, 3]


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1)
    assert pages == [1]
    pool.share(1)
    pool.release([1])
    assert pool.free_pages() == [2]
    pool.release([1])
    assert pool.free_pages() == [2, 1]


def test_releasing_a_free_page_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="page 1 is free already"):
        PagePool(3).release([1])


def test_a_pool_of_one_page_is_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match="num_pages is 1; a pool needs at least 2"):
        PagePool(1)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "share"]), st.integers(0, 9)), max_size=60))
def test_it_behaves_as_a_plain_list(operations: list[tuple[str, int]]) -> None:
    pool, free, held = PagePool(8), list(range(1, 8)), list[int]()
    for what, number in operations:
        if what == "allocate":
            count = number % 4
            pages = pool.allocate(count)
            assert pages == (free[:count] if count <= len(free) else None)
            if pages is not None:
                free = free[count:]
                held += pages
        elif what == "release" and held:
            page = held.pop(number % len(held))
            pool.release([page])
            if page not in held:
                free.append(page)
        elif what == "share":
            page = 1 + number % 7
            pool.share(page)
            held.append(page)
            if page in free:
                free.remove(page)
        assert pool.free_pages() == free
        assert pool.num_free == len(free)
        assert all(pool.references(page) == held.count(page) for page in range(1, 8))
