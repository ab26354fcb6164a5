"""worker.proto's checksum of the row tables: a sum over positions and pages, modulo 2^64. Needs numpy.

Owns the formula. Its users keep the sums.
"""

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]
MASK_64 = (1 << 64) - 1
# As arrays without dimensions: ufuncs convert any other number at each call.
_GAMMA = np.array(0x9E3779B97F4A7C15, np.uint64)
_FACTORS = np.array(0xBF58476D1CE4E5B9, np.uint64), np.array(0x94D049BB133111EB, np.uint64)
_SHIFTS = np.array(30, np.uint64), np.array(27, np.uint64), np.array(31, np.uint64)
_ROW_SHIFT, _COL_SHIFT = np.array(40), np.array(20)


def mix(values: UInt64Array) -> UInt64Array:
    """Applies the finalizer of splitmix64 (Steele, Lea, Flood 2014) to each element, modulo 2^64."""
    z = values + _GAMMA
    z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def mix_one(x: int) -> int:
    """Applies `mix` to one number, which is twenty times faster than `mix` of an array with one element."""
    z = x + 0x9E3779B97F4A7C15 & MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK_64
    return z ^ z >> 31


def row_weights(num_rows: int) -> UInt64Array:
    """The factors of the positions of rows 0 to num_rows - 1."""
    return mix((np.arange(num_rows, dtype=np.uint64) << np.uint64(40)) ^ np.uint64(0xFFFFF)) | np.uint64(1)


def sum_of_positions(positions: NDArray[np.int64], weights: UInt64Array) -> int:
    """The part of the rows' next positions, both [rows]."""
    return int(np.dot(positions.view(np.uint64), weights))


def sum_of_pages(rows: NDArray[np.int64], cols: NDArray[np.int64], pages: NDArray[np.integer]) -> int:
    """The part of the entries [n] of the page table: logical page cols[i] of row rows[i] is pages[i]."""
    terms = mix(((rows << _ROW_SHIFT) ^ (cols << _COL_SHIFT) ^ pages).view(np.uint64))
    return int(np.add.reduce(terms))
