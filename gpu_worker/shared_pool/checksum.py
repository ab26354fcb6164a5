"""The checksum of a page: a weighted sum of its 64-bit words, modulo 2^64.

The heads of a layer's K (or V) are added first. Each word of the sum has an odd weight that depends on its place, so
that moved values change the result as well as changed ones. K and V of the layers, in order, are the digits of a
polynomial. It finds damage, not malice, at the cost of reading the page once.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
# Odd numbers: of splitmix64, and the multiplier of the polynomial.
_STEP, _MULTIPLIER = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


class PageChecksums:
    """Checksums of the pages of `pools`, each [heads, tokens, dimension]."""

    def __init__(self, pools: Sequence[Tensor], page_size: int) -> None:
        # One [heads, pages, words of a head's page] for each pool.
        self._words: list[NDArray[np.uint64]] = []
        for pool in pools:
            num_bytes = page_size * pool.shape[2] * pool.element_size()
            assert num_bytes % 8 == 0, "a page has at least 16 tokens"
            memory = (ctypes.c_char * pool.nbytes).from_address(pool.data_ptr())
            self._words.append(np.frombuffer(memory, np.uint64).reshape(pool.shape[0], -1, num_bytes // 8))
        longest = max(words.shape[2] for words in self._words)
        # Products modulo 2^64 are exact in uint64.
        self._weights = (np.arange(1, longest + 1, dtype=np.uint64) * np.uint64(_STEP)) | np.uint64(1)

    def of(self, page: int) -> int:
        """The checksum of one page."""
        total = 0
        for words in self._words:
            summed = np.add.reduce(words[:, page], axis=0)
            total = (total * _MULTIPLIER + int(summed @ self._weights[: summed.size])) & _MASK
        return total
