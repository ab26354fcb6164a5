"""Uploads the arrays of a step to the device in one copy.

The inputs of a step come first in one buffer of a fixed size, at offsets that only the step's shape decides, so that
captured graphs can read them there. The other arrays follow, or go to a second buffer if they do not fit. There is one
more pinned host buffer than plans in flight; a buffer is reused after its copy has finished. On a CPU without padded
steps nothing is copied: tensors share the memory of the arrays.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.layout.shapes import StepShape
from gpu_worker.trees import mapped

_WORD_BYTES = 8
_TORCH_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}
# Words for arrays that are not inputs of the step: page table entries of rows that start, changes of logits.
_EXTRA_WORDS = 1 << 14


def arrays_of(tree: Any) -> list[NDArray[Any]]:
    """The arrays of a tree in the order of the fields."""
    arrays: list[NDArray[Any]] = []
    mapped(tree, arrays.append)
    return arrays


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
    """The device's copy of the step that was uploaded last."""

    def __init__(self, device: torch.device, num_buffers: int, *, input_words: int | None) -> None:
        """`input_words`: words of the largest inputs of a padded step; None if steps are not padded."""
        self._device, self._is_static = device, input_words is not None
        self._next = 0
        num = 0 if input_words is None else input_words + _EXTRA_WORDS
        self._buffer = torch.zeros(num, dtype=torch.int64, device=device)
        self._overflow = torch.zeros(0, dtype=torch.int64, device=device)
        self._hosts = [self._host_buffer(num) for _ in range(num_buffers)]
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        # The inputs of each shape of padded steps, as views of the buffer.
        self._inputs: dict[StepShape, Any] = {}

    def upload(self, shape: StepShape | None, inputs: Any, extras: Any) -> tuple[Any, Any]:
        """Returns both trees with tensors for their arrays, which are int64 or float32.

        Inputs of equal `shape` are at the same addresses in every step. The next upload overwrites them.
        """
        if not self._is_static:
            return mapped(inputs, torch.from_numpy), mapped(extras, torch.from_numpy)
        own, others = arrays_of(inputs), arrays_of(extras)
        num_own, num_others = num_words(own), num_words(others)
        fits = num_own + num_others <= self._buffer.numel()
        placed = self._copied([*own, *others] if fits else own, self._buffer)
        begin = placed[num_own:]
        if not fits:
            if num_others > self._overflow.numel():
                self._overflow = torch.zeros(1 << num_others.bit_length(), dtype=torch.int64, device=self._device)
            begin = self._copied(others, self._overflow)
        views = unpack(others, begin)
        return self._viewed(shape, inputs, own), mapped(extras, lambda _: next(views))

    def _viewed(self, shape: StepShape | None, inputs: Any, arrays: list[NDArray[Any]]) -> Any:
        if shape is not None and shape in self._inputs:
            return self._inputs[shape]
        views = unpack(arrays, self._buffer)
        viewed = mapped(inputs, lambda _: next(views))
        # Shapes with prompt logits are unlimited in number.
        if shape is not None and not shape.prompt_logits:
            self._inputs[shape] = viewed
        return viewed

    def _copied(self, arrays: list[NDArray[Any]], buffer: Tensor) -> Tensor:
        """Starts the copy of the packed arrays and returns the buffer."""
        total = num_words(arrays)
        host = self._free_host_buffer(total)
        pack(arrays, host.numpy())
        buffer[:total].copy_(host[:total], non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._events[self._next] = event
        self._next = (self._next + 1) % len(self._hosts)
        return buffer

    def _free_host_buffer(self, total: int) -> Tensor:
        event, host = self._events[self._next], self._hosts[self._next]
        if event is not None:
            event.synchronize()
        if host.numel() < total:
            host = self._hosts[self._next] = self._host_buffer(1 << total.bit_length())
        return host

    def _host_buffer(self, num: int) -> Tensor:
        return torch.zeros(num, dtype=torch.int64, pin_memory=self._device.type == "cuda")
