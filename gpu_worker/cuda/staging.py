"""What passes between the host and a GPU while steps are in flight: inputs and masks up, results down.

Owns the memory that copies read and write without waiting, and the events that say when they have ended.

The inputs of a step come first in one buffer of a fixed size, at offsets that only the step's shape decides, so that
captured graphs can read them there; the layout writes them into the host's buffer. The other arrays follow, or go to a
second buffer if they do not fit. There is one more pinned host buffer than plans in flight; a buffer is reused when its
copy has ended.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.arrays import Space
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.step.backend import MaskUpload
from gpu_worker.step.in_flight import MAX_IN_FLIGHT
from gpu_worker.step.output import StepOutput
from gpu_worker.trees import leaves, mapped

# Buffers that a copy reads or writes while other plans are in flight.
NUM_BUFFERS = MAX_IN_FLIGHT + 1
_WORD_BYTES = 8
_TORCH_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}
# Words for arrays that are not inputs of the step: page table entries of rows that start, changes of logits.
_EXTRA_WORDS = 1 << 14


class Stream:
    """The current stream of a GPU, as its steps use it."""

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns host memory of zeros that the device copies without waiting."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)


class Turns:
    """Rotates the buffers that copies read: one more than plans in flight, so that no copy waits long."""

    def __init__(self, stream: Stream, num_buffers: int = NUM_BUFFERS) -> None:
        self._stream, self.turn = stream, 0
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers

    def wait(self) -> int:
        """Waits until no copy reads the next buffer, and returns its number."""
        if (event := self._events[self.turn]) is not None:
            event.synchronize()
        return self.turn

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Starts a copy from that buffer, and moves on to the next one."""
        target.copy_(source, non_blocking=True)
        event = self._events[self.turn] = self._stream.event()
        event.record()
        self.turn = (self.turn + 1) % len(self._events)


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

    The next step's inputs are written to the arrays that `inputs` returns, then `upload` copies them.
    """

    def __init__(self, stream: Stream, device: torch.device, num_buffers: int, *, input_words: int) -> None:
        """`input_words`: words of the largest inputs of a step."""
        self._stream, self._device, self._turns = stream, device, Turns(stream, num_buffers)
        num = input_words + _EXTRA_WORDS
        self._buffer = torch.zeros(num, dtype=torch.int64, device=device)
        self._overflow = torch.zeros(0, dtype=torch.int64, device=device)
        self._hosts = [stream.pinned(num) for _ in range(num_buffers)]
        # For arrays that do not fit, as large as was needed so far.
        self._spares = [stream.pinned(0) for _ in range(num_buffers)]
        # By shape and host buffer. Shapes with prompt logits are unlimited in number, and not kept.
        self._placed: dict[tuple[StepShape, int], _Placed] = {}
        self._current = _NOTHING

    def inputs(self, shape: StepShape, allocate: Callable[[Space], Any]) -> Any:
        """Returns the inputs of the next step in a host buffer that no copy reads any more.

        allocate: returns inputs of the shape; it takes their arrays from the space.
        """
        turn = self._turns.wait()
        placed = self._placed.get((shape, turn))
        if placed is None:
            host = self._hosts[turn][: self._buffer.numel()]
            space = Space(host.numpy())
            on_host = allocate(space)
            target = self._buffer[: space.used]
            viewed = mapped(on_host, partial(self._view, address_of(host.numpy())))
            placed = _Placed(on_host=on_host, on_device=viewed, source=host[: space.used], target=target)
            if not shape.prompt_logits:
                self._placed[shape, turn] = placed
        self._current = placed
        return placed.on_host

    def _view(self, base: int, array: NDArray[Any]) -> Tensor:
        """Returns the place on the device of an array in the host buffer at address `base`."""
        begin = address_of(array) - base
        assert 0 <= begin <= self._buffer.nbytes - array.nbytes, "the array is not in the space of the inputs"
        view = self._buffer.view(_TORCH_TYPES[array.dtype])[begin // array.itemsize :][: array.size]
        return view.view(array.shape)

    def upload(self, inputs: Any, extras: Any) -> tuple[Any, Any]:
        """Returns both trees with tensors for their arrays, which are int64 or float32.

        `inputs` are None, or those that `inputs` returned last, which for equal shapes are at the same addresses in
        every step. The next upload overwrites them.
        """
        placed = self._current
        if inputs is None:
            self._turns.wait()
            placed = _NOTHING
        assert inputs is placed.on_host, "the inputs are not those of this step"
        others = leaves(extras)
        if not others:
            if placed.source is not None and placed.target is not None:
                self._turns.copy(placed.source, placed.target)
            return placed.on_device, extras
        return placed.on_device, self._uploaded_with(placed, extras, others)

    def _uploaded_with(self, placed: "_Placed", extras: Any, arrays: list[NDArray[Any]]) -> Any:
        """Uploads the inputs with these arrays after them, or in a copy of their own if they do not fit."""
        begin = 0 if placed.source is None else placed.source.numel()
        end = begin + num_words(arrays)
        host, buffer = self._hosts[self._turns.turn], self._buffer
        if end > self._buffer.numel():
            if placed.source is not None and placed.target is not None:
                self._turns.copy(placed.source, placed.target)
                self._turns.wait()
            begin, end = 0, end - begin
            host, buffer = self._enlarged(end)
        pack(arrays, host.numpy()[begin:])
        self._turns.copy(host[:end], buffer[:end])
        views = unpack(arrays, buffer[begin:])
        return mapped(extras, lambda _: next(views))

    def _enlarged(self, num: int) -> tuple[Tensor, Tensor]:
        """Returns a host buffer and a buffer on the device that hold `num` words and no inputs."""
        if num > self._overflow.numel():
            self._overflow = torch.zeros(1 << num.bit_length(), dtype=torch.int64, device=self._device)
        # Apart from the buffers of inputs, in which the inputs of each shape have their places.
        turn = self._turns.turn
        if num > self._spares[turn].numel():
            self._spares[turn] = self._stream.pinned(1 << num.bit_length())
        return self._spares[turn], self._overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """The inputs of a shape in one host buffer, and where they go."""

    on_host: Any = None
    on_device: Any = None
    # int64 [n]: the words of the inputs on the host and on the device.
    source: Tensor | None = None
    target: Tensor | None = None


_NOTHING = _Placed()


def address_of(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


class ResultRing:
    """Pinned host memory for results, because its allocation may wait for the device.

    A buffer is taken when a plan is submitted and returned when its outcome is collected, that is after the copy has
    ended and the host has read it. There are as many buffers as plans in flight and one more; others are allocated if
    these do not suffice. They hold the tokens of every row, and become larger with the first larger results.
    """

    def __init__(self, *, num_buffers: int, num_tokens: int, allocate: Callable[[int], Tensor]) -> None:
        """allocate: returns int64 [n], in pinned memory if a device copies to it."""
        self._num_buffers, self._allocate = num_buffers, allocate
        self._num_words = 0
        self._free: list[Tensor] = []
        self._enlarge(num_tokens)

    def to_host(self, output: StepOutput) -> StepOutput:
        """Starts the copies to a buffer, which are valid after the current stream has executed them."""
        tensors = leaves(output)
        # In 8-byte words, so that each begins aligned.
        sizes = [-(-tensor.nbytes // 8) for tensor in tensors]
        if sum(sizes) > self._num_words:
            self._enlarge(sum(sizes))
        buffer = self._free.pop() if self._free else self._allocate(self._num_words)
        if len(tensors) == 1:
            # Tokens only, which is the usual result.
            tokens = buffer[: sizes[0]]
            tokens.copy_(output.tokens, non_blocking=True)
            return StepOutput(tokens=tokens, buffer=buffer)
        parts = iter(buffer[: sum(sizes)].split(sizes))
        copied: StepOutput = mapped(output, lambda tensor: _copied(tensor, next(parts)))
        return replace(copied, buffer=buffer)

    def put_back(self, output: StepOutput) -> None:
        """Takes back the buffer of collected results; its tensors are invalid from now on."""
        if output.buffer is not None and output.buffer.numel() == self._num_words:
            self._free.append(output.buffer)

    def _enlarge(self, num_words: int) -> None:
        """Replaces the free buffers. Those in use are dropped when they come back."""
        self._num_words = max(1, 1 << (num_words - 1).bit_length())
        self._free = [self._allocate(self._num_words) for _ in range(self._num_buffers)]


def _copied(tensor: Tensor, words: Tensor) -> Tensor:
    host = words.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    return host.copy_(tensor, non_blocking=True)


def pinned_masks(stream: Stream, device: torch.device, *, max_rows: int, mask_words: int) -> MaskUpload:
    """mask_words: int32 words of a row's mask."""
    turns = Turns(stream)
    hosts = [stream.pinned(max_rows, mask_words, dtype=torch.int32) for _ in range(NUM_BUFFERS)]
    on_device = torch.zeros(max_rows, mask_words, dtype=torch.int32, device=device)

    def upload(num_rows: int, write: Callable[[NDArray[np.int32]], None]) -> Tensor:
        host, masks = hosts[turns.wait()][:num_rows], on_device[:num_rows]
        write(host.numpy())
        turns.copy(host, masks)
        return masks.view(torch.uint8)

    return upload
