"""Uploads all arrays of a tree to the device in one copy.

The fields of a tree, a frozen dataclass, are arrays, trees, tuples of these, or other values. There is one more pinned
host buffer than plans in flight; a buffer is reused after its copy has finished. On a CPU the tensors share the arrays'
memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST_WORDS = 1 << 14
_WORD_BYTES = 8
_TORCH_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the tree with every array or tensor x replaced by change(x), in the order of the fields."""
    if isinstance(tree, (np.ndarray, Tensor)):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple([mapped(part, change) for part in tree])
    names = _field_names(type(tree))
    return type(tree)(**{name: mapped(getattr(tree, name), change) for name in names}) if names else tree


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def num_words(arrays: Iterable[NDArray[Any]]) -> int:
    """Returns the number of 8-byte words that `pack` writes."""
    return sum(-(-array.nbytes // _WORD_BYTES) for array in arrays)


def pack(arrays: Iterable[NDArray[Any]], words: NDArray[np.int64]) -> None:
    """Writes the arrays one after another, each aligned to 8 bytes."""
    views = {kind: words.view(kind) for kind in _TORCH_TYPES}
    for array, start in _placed(arrays):
        views[array.dtype][start : start + array.size] = array.reshape(-1)


def unpack(arrays: Iterable[NDArray[Any]], words: Tensor) -> Iterator[Tensor]:
    """Yields views of packed `words` with the types and shapes of `arrays`."""
    views = {kind: words.view(torch_type) for kind, torch_type in _TORCH_TYPES.items()}
    for array, start in _placed(arrays):
        view = views[array.dtype][start : start + array.size]
        yield view if array.ndim == 1 else view.view(array.shape)


def _placed(arrays: Iterable[NDArray[Any]]) -> Iterator[tuple[NDArray[Any], int]]:
    """Yields each array with the index of its first element, counted in elements of its type."""
    word = 0
    for array in arrays:
        yield array, word * _WORD_BYTES // array.itemsize
        word += -(-array.nbytes // _WORD_BYTES)


class Staging:
    """Uploads trees. The next upload overwrites the device's copy."""

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._next = 0
        self._hosts: list[Tensor | None] = [None] * num_buffers
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._on_device = torch.zeros(0 if device.type == "cpu" else _LEAST_WORDS, dtype=torch.int64, device=device)

    def upload(self, tree: Any) -> Any:
        """Returns the tree with tensors for its arrays, which are int64 or float32.

        Python cannot express the type Tree[HostArray] → Tree[Tensor], so callers annotate the result.
        """
        if self._device.type == "cpu":
            return mapped(tree, torch.from_numpy)
        arrays: list[NDArray[Any]] = []
        mapped(tree, arrays.append)
        views = unpack(arrays, self._copied(arrays))
        return mapped(tree, lambda _: next(views))

    def _copied(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Starts the copy of the packed arrays and returns the device's buffer."""
        total = num_words(arrays)
        if total > self._on_device.numel():
            self._on_device = torch.zeros(1 << total.bit_length(), dtype=torch.int64, device=self._device)
        host = self._free_host_buffer(total)
        pack(arrays, host.numpy())
        self._on_device[:total].copy_(host[:total], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._hosts)
        return self._on_device

    def _free_host_buffer(self, total: int) -> Tensor:
        event, host = self._events[self._next], self._hosts[self._next]
        if event is not None:
            event.synchronize()
        if host is None or host.numel() < total:
            size = max(_LEAST_WORDS, 1 << total.bit_length())
            host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
            self._hosts[self._next] = host
        return host
