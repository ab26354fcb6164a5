"""The hash of the checksum of row tables, against the published generator and plain integers."""

import numpy as np

from tandem_contract.row_checksum import MASK_64, mix, mix_one, row_weights, sum_of_pages, sum_of_positions


def plain_mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK_64
    return z ^ z >> 31


def test_mix_computes_splitmix64() -> None:
    """The first outputs of the published generator from the states 0, 0 after a step, and 1234567."""
    states = np.array([0, 0x9E3779B97F4A7C15, 1234567], np.uint64)
    assert mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 6457827717110365317]
    values = [0, 1, 2**40, 2**63, MASK_64]
    assert mix(np.array(values, np.uint64)).tolist() == [plain_mix(value) for value in values]
    assert [mix_one(value) for value in values] == [plain_mix(value) for value in values]


def test_the_sums_are_those_of_the_proto() -> None:
    rows, cols, pages = (np.array(each, np.int64) for each in ([1, 1, 65_535], [0, 1, 130_000], [5, 9, 1_048_575]))
    entries = zip(rows.tolist(), cols.tolist(), pages.tolist(), strict=True)
    terms = [plain_mix(row << 40 ^ col << 20 ^ page) for row, col, page in entries]
    assert sum_of_pages(rows, cols, pages) == sum(terms) & MASK_64
    weights, positions = row_weights(4), np.array([0, 3, 1 << 24, 7], np.int64)
    assert weights.tolist() == [plain_mix(row << 40 ^ 0xFFFFF) | 1 for row in range(4)]
    assert sum_of_positions(positions, weights) == sum(map(int.__mul__, positions.tolist(), weights.tolist())) & MASK_64
