"""Checksums of pages, computed on the device: those of `checksum.py`, from a few launches and without a wait.

Products and sums of int64 wrap modulo 2^64 on every device, so the results equal those of unsigned words.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cuda_memory.tensors import bytes_at
from gpu_worker.shared_pool.checksum import odd
from gpu_worker.shared_pool.first_pages import PAGES_AT_ONCE


class DeviceChecksums:
    """Checksums of the pages of a pool; at most `num_buffers - 1` results may be unread."""

    def __init__(self, words: Sequence[Tensor], num_pages: int, *, num_buffers: int) -> None:
        """words: int64 [pools, heads, pages, words of a page] for each group of pools, as `words_of` returns them."""
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
    """The pools [heads, tokens, dimension] as the words of their pages, for `DeviceChecksums`.

    Pools of one shape at equal distances in memory are one group, so that one launch reads them all.
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
    num_pages, num_words = first.shape[1] // page_size, page_size * first.shape[2] * first.element_size() // 8
    return whole.as_strided(
        (len(pools), first.shape[0], num_pages, num_words), (distance // 8, num_pages * num_words, num_words, 1)
    )


def _weights(shapes: Sequence[tuple[int, int]]) -> list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """[pools, words] for each group: the weight of a pool times that of a word."""
    of_words = odd(max(words for _, words in shapes))
    of_pools = np.split(odd(sum(pools for pools, _ in shapes)), np.cumsum([pools for pools, _ in shapes])[:-1])
    return [np.outer(own, of_words[:words]).view(np.int64) for own, (_, words) in zip(of_pools, shapes, strict=True)]
