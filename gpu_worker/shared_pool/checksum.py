"""The checksum of a page: a weighted sum of its 64-bit words, modulo 2^64.

The heads of a layer's K (or V) are added first. Each word of the sum has an odd weight that depends on its place, so
that moved values change the result as well as changed ones; K and V of the layers, in order, have odd weights, too. It
finds damage, not malice, at the cost of reading the page once.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# The odd increment of splitmix64.
_STEP = 0x9E3779B97F4A7C15


class PageChecksums:
    """Checksums of the pages of `pools`, each [heads, tokens, dimension]."""

    def __init__(self, pools: Sequence[Tensor], page_size: int) -> None:
        # Pools of one shape at equal distances in memory are read by one call: [pools, heads, pages, words of a page].
        self._words: list[NDArray[np.uint64]] = []
        sizes = {(pool.shape, pool.element_size()) for pool in pools}
        steps = {after.data_ptr() - before.data_ptr() for before, after in pairwise(pools)}
        groups = [list(pools)] if len(sizes) == 1 and len(steps) == 1 and min(steps) > 0 else [[pool] for pool in pools]
        for group in groups:
            self._words.append(_words_of(group, page_size))
        # Products modulo 2^64 are exact in uint64.
        self._of_words = odd(max(words.shape[3] for words in self._words))
        self._of_pools = odd(len(pools))

    def of(self, page: int) -> int:
        """The checksum of one page."""
        sums = [np.add.reduce(words[:, :, page], axis=1) @ self._of_words[: words.shape[3]] for words in self._words]
        return int((sums[0] if len(sums) == 1 else np.concatenate(sums)) @ self._of_pools)


def _words_of(pools: Sequence[Tensor], page_size: int) -> NDArray[np.uint64]:
    first = pools[0]
    num_bytes = page_size * first.shape[2] * first.element_size()
    assert num_bytes % 8 == 0, "a page has at least 16 tokens"
    distance = pools[1].data_ptr() - first.data_ptr() if len(pools) > 1 else first.nbytes
    whole = (ctypes.c_char * (distance * (len(pools) - 1) + first.nbytes)).from_address(first.data_ptr())
    num_pages = first.shape[1] // page_size
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(whole, np.uint64),
        (len(pools), first.shape[0], num_pages, num_bytes // 8),
        (distance, num_pages * num_bytes, num_bytes, 8),
    )


def odd(count: int) -> NDArray[np.uint64]:
    """`count` odd weights, each different."""
    return (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)) | np.uint64(1)
