"""Uploads the arrays of a step to the device in one copy.

The inputs of a step come first in one buffer of a fixed size, at offsets that only the step's shape decides, so that
captured graphs can read them there; the layout writes them into the host's buffer. The other arrays follow, or go to a
second buffer if they do not fit. There is one more pinned host buffer than plans in flight; a buffer is reused when its
copy has ended. On a CPU without padded steps nothing is copied: tensors share the memory of the arrays.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.arrays import Space
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
    """The device's copy of the step that was uploaded last.

    A step's inputs are laid out in the `space` of a host buffer, then `upload` copies the buffer.
    """

    def __init__(self, device: torch.device, num_buffers: int, *, input_words: int | None) -> None:
        """`input_words`: words of the largest inputs of a padded step; None if steps are not padded."""
        self._device, self._is_static = device, input_words is not None
        self._next = 0
        num = 0 if input_words is None else input_words + _EXTRA_WORDS
        self._buffer = torch.zeros(num, dtype=torch.int64, device=device)
        self._overflow = torch.zeros(0, dtype=torch.int64, device=device)
        self._hosts = [self._host_buffer(num) for _ in range(num_buffers)]
        # The same memory.
        self._words = [host.numpy() for host in self._hosts]
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._space = Space()
        # The inputs of each shape of padded steps, as views of the buffer.
        self._inputs: dict[StepShape, Any] = {}

    def space(self) -> Space:
        """Memory for the inputs of the next step, which no copy reads any more. It is valid until the next upload."""
        if self._is_static:
            self._wait_for_buffer()
            self._space = Space(self._words[self._next][: self._buffer.numel()])
        return self._space

    def upload(self, shape: StepShape | None, inputs: Any, extras: Any) -> tuple[Any, Any]:
        """Returns both trees with tensors for their arrays, which are int64 or float32.

        The arrays of `inputs` are in the last `space`. Inputs of equal `shape` are at the same addresses in every step.
        The next upload overwrites them.
        """
        if not self._is_static:
            return mapped(inputs, torch.from_numpy), mapped(extras, torch.from_numpy)
        others = arrays_of(extras)
        num_own, num_others = self._space.used, num_words(others)
        if inputs is None:
            self._wait_for_buffer()
            num_own = 0
        fits = num_own + num_others <= self._buffer.numel()
        if fits:
            pack(others, self._words[self._next][num_own:])
        viewed = None if inputs is None else self._viewed(shape, inputs)
        begin = self._buffer[num_own:]
        self._copy(self._hosts[self._next], num_own + (num_others if fits else 0), self._buffer)
        if not fits:
            begin = self._uploaded_apart(others, num_others)
        views = unpack(others, begin)
        return viewed, mapped(extras, lambda _: next(views)) if others else extras

    def _viewed(self, shape: StepShape | None, inputs: Any) -> Any:
        viewed = self._inputs.get(shape) if shape is not None else None
        if viewed is None:
            viewed = mapped(inputs, self._view)
            # Shapes with prompt logits are unlimited in number.
            if shape is not None and not shape.prompt_logits:
                self._inputs[shape] = viewed
        return viewed

    def _view(self, array: NDArray[Any]) -> Tensor:
        """Returns the place on the device of an array in the host buffer."""
        begin = address_of(array) - address_of(self._words[self._next])
        assert 0 <= begin <= self._buffer.nbytes - array.nbytes, "the array is not in the space of the step"
        view = self._buffer.view(_TORCH_TYPES[array.dtype])[begin // array.itemsize :][: array.size]
        return view.view(array.shape)

    def _uploaded_apart(self, arrays: list[NDArray[Any]], total: int) -> Tensor:
        """Uploads arrays that are too large for the buffer of the inputs."""
        if total > self._overflow.numel():
            self._overflow = torch.zeros(1 << total.bit_length(), dtype=torch.int64, device=self._device)
        self._wait_for_buffer()
        host, words = self._hosts[self._next], self._words[self._next]
        if words.size < total:
            host = self._host_buffer(1 << total.bit_length())
            words = host.numpy()
            self._hosts[self._next], self._words[self._next] = host, words
        pack(arrays, words)
        self._copy(host, total, self._overflow)
        return self._overflow

    def _copy(self, host: Tensor, total: int, buffer: Tensor) -> None:
        """Starts the copy and moves on to the next host buffer."""
        if total:
            buffer[:total].copy_(host[:total], non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._events[self._next] = event
        self._next = (self._next + 1) % len(self._hosts)

    def _wait_for_buffer(self) -> None:
        event = self._events[self._next]
        if event is not None:
            event.synchronize()

    def _host_buffer(self, num: int) -> Tensor:
        return torch.zeros(num, dtype=torch.int64, pin_memory=self._device.type == "cuda")


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]
