"""The checksum of a page: a weighted sum of its 64-bit words, modulo 2^64.

Each word of K (or V) of a layer has an odd weight that depends on its place in a head, so that moved values change the
sum as well as changed ones; heads are not told apart. K and V of the layers, in order, have odd weights, too. It finds
damage, not malice, at the cost of reading the page once. The kernels of the machine compute it if they are built
(`native/page_sum.h`), otherwise numpy does; the sums are equal, so that another worker can check them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.native.library import native_library

# The odd increment of splitmix64.
_STEP = 0x9E3779B97F4A7C15


class PageChecksums:
    """Checksums of the pages of `pools`, each [heads, tokens, dimension]."""

    def __init__(self, pools: Sequence[Tensor], page_size: int) -> None:
        # Pools of one shape at equal distances in memory are read by one call.
        sizes = {(pool.shape, pool.element_size()) for pool in pools}
        steps = {after.data_ptr() - before.data_ptr() for before, after in pairwise(pools)}
        groups = [list(pools)] if len(sizes) == 1 and len(steps) == 1 and min(steps) > 0 else [[pool] for pool in pools]
        of_pools = iter(odd(len(pools)))
        self._groups = [
            _Group(words, odd(words.shape[3]), np.array([next(of_pools) for _ in group], np.uint64))
            for group, words in ((group, _words_of(group, page_size)) for group in groups)
        ]
        library = native_library()
        self._calls: list[_PageWords] = []
        if library is not None:
            self._sum: Any = library.functions.tandem_page_sum
            self._sum.argtypes, self._sum.restype = (ctypes.POINTER(_PageWords), ctypes.c_int64), ctypes.c_uint64
            self._calls = [group.call() for group in self._groups]

    def of(self, page: int) -> int:
        """The checksum of one page."""
        if self._calls:
            return sum(self._sum(call, page) for call in self._calls) & 0xFFFFFFFFFFFFFFFF
        return sum(group.sum(page) for group in self._groups) & 0xFFFFFFFFFFFFFFFF


class _PageWords(ctypes.Structure):
    """PageWords of native/page_sum.h."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("of_words", ctypes.c_void_p),
        ("of_pools", ctypes.c_void_p),
        ("num_pools", ctypes.c_int64),
        ("pool_distance", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_distance", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Pools of one shape."""

    # [pools, heads, pages, words of a page]
    words: NDArray[np.uint64]
    # Weights: [words of a page] and [pools].
    of_words: NDArray[np.uint64]
    of_pools: NDArray[np.uint64]

    def sum(self, page: int) -> int:
        """The group's part of the checksum of a page. Products modulo 2^64 are exact in uint64."""
        sums = np.add.reduce(self.words[:, :, page], axis=1) @ self.of_words
        return int(sums @ self.of_pools)

    def call(self) -> _PageWords:
        """The same for the kernel. The addresses are valid as long as this group."""
        num_pools, num_heads, _, num_words = self.words.shape
        pool_distance, head_distance, _, _ = (distance // 8 for distance in self.words.strides)
        addresses = (each.ctypes.data for each in (self.words, self.of_words, self.of_pools))
        return _PageWords(*addresses, num_pools, pool_distance, num_heads, head_distance, num_words)


def _words_of(pools: Sequence[Tensor], page_size: int) -> NDArray[np.uint64]:
    first = pools[0]
    num_bytes = page_size * first.shape[2] * first.element_size()
    assert num_bytes % 8 == 0, "a page has at least 16 tokens"
    distance = pools[1].data_ptr() - first.data_ptr() if len(pools) > 1 else first.nbytes
    whole: Any = (ctypes.c_char * (distance * (len(pools) - 1) + first.nbytes)).from_address(first.data_ptr())
    num_pages = first.shape[1] // page_size
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(whole, np.uint64),
        (len(pools), first.shape[0], num_pages, num_bytes // 8),
        (distance, num_pages * num_bytes, num_bytes, 8),
    )


def odd(count: int) -> NDArray[np.uint64]:
    """`count` odd weights, each different."""
    return (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)) | np.uint64(1)
