"""The checksum of a page: a weighted sum of its 64-bit words, modulo 2^64.

Each word of K (or V) of a layer has an odd weight that depends on its place in a head, so that moved values change the
sum as well as changed ones; heads are not told apart. K and V of the layers, in order, have odd weights, too. It finds
damage, not malice, at the cost of reading the page once. In host memory the kernels of the machine compute it if they
are built (`native/page_sum.h`), otherwise numpy does; on a device it takes a few launches and no wait. The sums are
equal, so that another worker can check them: products and sums of int64 wrap modulo 2^64 on every device.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.geometry import PAGES_AT_ONCE
from gpu_worker.native.library import native_library
from gpu_worker.shared_pool.cuda_region import bytes_at

# The odd increment of splitmix64.
_STEP = 0x9E3779B97F4A7C15


class PageChecksums:
    """Checksums of the pages of `pools`, each [heads, tokens, dimension]."""

    def __init__(self, pools: Sequence[Tensor], page_size: int) -> None:
        of_pools = iter(odd(len(pools)))
        self._groups = [
            _Group(words, odd(words.shape[3]), np.array([next(of_pools) for _ in words], np.uint64))
            for words in (group.numpy().view(np.uint64) for group in words_of(pools, page_size))
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


def odd(count: int) -> NDArray[np.uint64]:
    """`count` odd weights, each different."""
    return (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)) | np.uint64(1)


class DeviceChecksums:
    """Checksums of the pages of a pool; at most `num_buffers - 1` results may be unread."""

    def __init__(self, words: Sequence[Tensor], num_pages: int, *, num_buffers: int) -> None:
        """words: of each group of pools, as `words_of` returns them."""
        device = words[0].device
        self._words = words
        weights = _weights([(group.shape[0], group.shape[3]) for group in words])
        self._weights = [torch.from_numpy(each).to(device) for each in weights]
        self._sums = [torch.zeros((PAGES_AT_ONCE, *each.shape), dtype=torch.int64, device=device) for each in weights]
        self._parts = torch.zeros((len(words), num_pages), dtype=torch.int64, device=device)
        self._found = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self._device, self._next = device, 0
        self._results = [
            torch.zeros(num_pages, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(num_buffers)
        ]

    @torch.inference_mode()
    def begin(self, pages: Sequence[int]) -> Callable[[], list[int]]:
        """Enqueues the checksums of the pages' present content. The function returns them when the work has ended."""
        count, result = len(pages), self._results[self._next]
        self._next = (self._next + 1) % len(self._results)
        for at in range(0, count, PAGES_AT_ONCE):
            some = pages[at : at + PAGES_AT_ONCE]
            for number, (words, weights, sums) in enumerate(zip(self._words, self._weights, self._sums, strict=True)):
                for place, page in enumerate(some):
                    torch.sum(words[:, :, page], dim=1, out=sums[place])
                weighted = sums[: len(some)].mul_(weights)
                torch.sum(weighted, dim=(1, 2), out=self._parts[number, at : at + len(some)])
        torch.sum(self._parts[:, :count], dim=0, out=self._found[:count])
        result[:count].copy_(self._found[:count], non_blocking=True)
        return lambda: result[:count].numpy().view(np.uint64).tolist()

    def of(self, pages: Sequence[int]) -> list[int]:
        """The checksums of the pages' present content. Waits for the device."""
        read = self.begin(pages)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return read()


def words_of(pools: Sequence[Tensor], page_size: int) -> list[Tensor]:
    """The pools [heads, tokens, dimension] as the words of their pages, int64 [pools, heads, pages, words of a page].

    Pools of one shape at equal distances in memory are one group, so that one call or launch reads them all.
    """
    groups: list[list[Tensor]] = []
    for pool in pools:
        if groups and _continues(groups[-1], pool):
            groups[-1].append(pool)
        else:
            groups.append([pool])
    return [_group(group, page_size) for group in groups]


def _continues(group: Sequence[Tensor], pool: Tensor) -> bool:
    distances = [after.data_ptr() - before.data_ptr() for before, after in pairwise([*group[-2:], pool])]
    return pool.shape == group[0].shape and min(distances) > 0 and len(set(distances)) == 1


def _group(pools: Sequence[Tensor], page_size: int) -> Tensor:
    first = pools[0]
    distance = pools[1].data_ptr() - first.data_ptr() if len(pools) > 1 else 0
    whole = bytes_at(first.data_ptr(), distance * (len(pools) - 1) + first.nbytes, first.device).view(torch.int64)
    num_pages, num_bytes = first.shape[1] // page_size, page_size * first.shape[2] * first.element_size()
    assert num_bytes % 8 == 0, "a page has at least 16 tokens"
    num_words = num_bytes // 8
    return whole.as_strided(
        (len(pools), first.shape[0], num_pages, num_words), (distance // 8, num_pages * num_words, num_words, 1)
    )


def _weights(shapes: Sequence[tuple[int, int]]) -> list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """[pools, words] for each group: the weight of a pool times that of a word."""
    of_words = odd(max(words for _, words in shapes))
    of_pools = np.split(odd(sum(pools for pools, _ in shapes)), np.cumsum([pools for pools, _ in shapes])[:-1])
    return [np.outer(own, of_words[:words]).view(np.int64) for own, (_, words) in zip(of_pools, shapes, strict=True)]
