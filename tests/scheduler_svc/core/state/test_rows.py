"""The checksum against the formula of worker.proto in plain integers, and the tail of new tokens."""

from itertools import combinations, permutations

import numpy as np
import pytest

from scheduler_svc.core.messages.arrays import index_of
from scheduler_svc.core.state.request import Phase
from scheduler_svc.core.state.rows import TAIL_TOKENS, Rows
from tests.scheduler_svc.core.state.test_request import request

MASK = (1 << 64) - 1


def plain_mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def plain_checksum(tables: dict[int, tuple[int, list[int]]]) -> int:
    total = 0
    for row, (position, pages) in tables.items():
        total += position * (plain_mix(row << 40 ^ 0xFFFFF) | 1)
        total += sum(plain_mix(row << 40 ^ i << 20 ^ page) for i, page in enumerate(pages))
    return total & MASK


def seat(rows: Rows, pages: list[int], first_position: int = 0) -> int:
    return rows.seat(request(Phase.WAITING), pages, 0, first_position=first_position, held_from=0)


def test_the_checksum_covers_starts_appends_steps_and_ended_rows() -> None:
    rows = Rows(3)
    assert seat(rows, [5, 2], first_position=1) == 1
    assert rows.checksum == plain_checksum({1: (1, [5, 2])})
    rows.plan(np.array([1]), slice(1, 2), np.array([2], np.int32), np.array([], np.int64))
    rows.append_page(1, 7)
    assert rows.checksum == plain_checksum({1: (3, [5, 2, 7])})
    assert seat(rows, [1]) == 2
    rows.unseat(1)
    assert rows.checksum == plain_checksum({1: (3, [5, 2, 7]), 2: (0, [1])})
    assert seat(rows, [9]) == 1
    assert rows.checksum == plain_checksum({1: (0, [9]), 2: (0, [1])})


def test_tokens_keep_their_order_across_the_tail() -> None:
    rows, subject = Rows(1), request(Phase.WAITING)
    row = np.array([rows.seat(subject, [1], 0, first_position=0, held_from=0)])
    tokens = [(37 * i) % 1000 for i in range(2 * TAIL_TOKENS + 5)]
    for token in tokens:
        rows.tokens_in_flight[row] += 1
        rows.add_sampled(row, index_of(row), np.array([token], np.int32))
    known = [1, 2, *tokens]
    for start, end in [
        (0, 2),
        (1, 4),
        (TAIL_TOKENS - 3, TAIL_TOKENS + 9),
        (2 * TAIL_TOKENS - 1, len(known)),
        (0, len(known)),
    ]:
        assert rows.tokens_between(1, start, end).tolist() == known[start:end]
    rows.unseat(1)
    assert subject.tokens_between(0, subject.known).tolist() == known
    for start, end in [(0, 1), (1, 4), (TAIL_TOKENS, TAIL_TOKENS + 9), (0, len(known))]:
        assert subject.tokens_between(start, end).tolist() == known[start:end]


@pytest.mark.parametrize("count", [1, 15, 16, 40])
def test_the_checksum_covers_pages_of_many_rows(count: int) -> None:
    rows, tables = Rows(40), dict[int, tuple[int, list[int]]]()
    for row in range(1, count + 1):
        assert seat(rows, [row]) == row
        tables[row] = (0, [row])
    for first in (100, 200):
        rows.append_pages(list(tables), [first + row for row in tables])
        tables = {row: (0, [*pages, first + row]) for row, (_, pages) in tables.items()}
        assert rows.checksum == plain_checksum(tables)
    # A row that is seated again replaces what it contributed.
    rows.unseat(count)
    assert seat(rows, [7]) == count
    assert rows.checksum == plain_checksum(tables | {count: (0, [7])})


def test_an_index_names_the_same_rows_in_the_same_order() -> None:
    numbers = np.arange(100)
    ranges = [np.arange(first, end) for first in range(6) for end in range(first, 6)]
    ascending = [*ranges, *map(np.array, combinations(range(1, 8), 4))]
    for rows in ascending:
        assert numbers[index_of(rows, is_ascending=True)].tolist() == rows.tolist()
    for rows in [*ascending, *map(np.array, permutations(range(1, 6)))]:
        assert numbers[index_of(rows)].tolist() == rows.tolist()
    assert index_of(np.arange(3, 9)) == slice(3, 9)
