"""What of the host is on the device: the row tables that kernels read, and the arrays of a step, in one copy.

The inputs of a step come first in one buffer of a fixed size, at offsets that only the step's shape decides, so that
captured graphs can read them there; the layout writes them into the host's buffer. The other arrays follow, or go to a
second buffer if they do not fit. There is one more pinned host buffer than plans in flight; a buffer is reused when its
copy has ended. On a CPU without padded steps nothing is copied: tensors share the memory of the arrays.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.arrays import Space
from gpu_worker.geometry import Geometry
from gpu_worker.layout.row_tables import SlotEdits
from gpu_worker.layout.shapes import StepShape
from gpu_worker.trees import leaves, mapped

MAX_IN_FLIGHT = 2
# Of what a copy reads or writes while other plans are in flight.
NUM_BUFFERS = MAX_IN_FLIGHT + 1
_WORD_BYTES = 8
_TORCH_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}
# Words for arrays that are not inputs of the step: page table entries of rows that start, changes of logits.
_EXTRA_WORDS = 1 << 14


class DeviceTables:
    """The tables that kernels read: the page table, each page's logical index, newest tokens."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        num_rows = geometry.max_rows + 1
        # FlexAttention on a CPU requires lists as wide as the pool; other kernels need only the pages of a row.
        width = geometry.num_pages if device.type == "cpu" else geometry.pages_per_row
        self.pages = torch.zeros(num_rows, max(width, geometry.pages_per_row), dtype=torch.int32, device=device)
        # A page that several rows share has the same logical index in each. The last entry is for the learned sinks.
        self.logical_of_page = torch.zeros(geometry.num_pages + 1, dtype=torch.int32, device=device)
        # The newest token of each row; row 0 is padding.
        self.newest_token = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def set_pages(self, edits: SlotEdits[torch.Tensor]) -> None:
        """Applies a plan's edits of the page table."""
        rows, cols, pages = edits.entries.unbind()
        self.pages.index_put_((rows, cols), pages.int())
        self.logical_of_page.index_put_((pages,), cols.int())


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

    def __init__(self, device: torch.device, num_buffers: int, *, input_words: int | None) -> None:
        """`input_words`: words of the largest inputs of a padded step; None if steps are not padded."""
        self._device, self._is_static = device, input_words is not None
        self._next = 0
        num = 0 if input_words is None else input_words + _EXTRA_WORDS
        self._buffer = torch.zeros(num, dtype=torch.int64, device=device)
        self._overflow = torch.zeros(0, dtype=torch.int64, device=device)
        self._hosts = [self._host_buffer(num) for _ in range(num_buffers)]
        # For arrays that do not fit, as large as was needed so far.
        self._spares = [self._host_buffer(0) for _ in range(num_buffers)]
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        # By shape and host buffer. Shapes with prompt logits are unlimited in number, and not kept.
        self._placed: dict[tuple[StepShape, int], _Placed] = {}
        self._current = _NOTHING

    def inputs(self, shape: StepShape, allocate: Callable[[Space], Any]) -> Any:
        """Returns the inputs of the next step, a padded one, in a host buffer that no copy reads any more.

        allocate: returns inputs of the shape, whose arrays it takes from the space.
        """
        self._wait_for_buffer()
        placed = self._placed.get((shape, self._next))
        if placed is None:
            host = self._hosts[self._next][: self._buffer.numel()]
            space = Space(host.numpy())
            on_host = allocate(space)
            own = self._buffer[: space.used]
            viewed = mapped(on_host, partial(self._view, address_of(host.numpy())))
            placed = _Placed(on_host=on_host, on_device=viewed, source=host[: space.used], target=own)
            if not shape.prompt_logits:
                self._placed[shape, self._next] = placed
        self._current = placed
        return placed.on_host

    def shared(self, shape: StepShape, allocate: Callable[[Space], Any]) -> Any:
        """Returns the inputs of the next step on a CPU, whose tensors share the memory of the arrays.

        Inputs of one shape are the same at each call, and no step may be running. allocate: as for `inputs`.
        """
        placed = self._placed.get((shape, 0))
        if placed is None:
            on_host = allocate(Space())
            placed = _Placed(on_host=on_host, on_device=mapped(on_host, torch.from_numpy))
            self._placed[shape, 0] = placed
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

        `inputs` are None, or those that `inputs` or `shared` returned last, which for equal shapes are at the same
        addresses in every step. If steps are not padded, they may be others. The next upload overwrites them.
        """
        placed = self._current
        if not self._is_static:
            is_shared = inputs is not None and inputs is placed.on_host
            on_device = placed.on_device if is_shared else mapped(inputs, torch.from_numpy)
            return on_device, mapped(extras, torch.from_numpy)
        if inputs is None:
            self._wait_for_buffer()
            placed = _NOTHING
        assert inputs is placed.on_host, "the inputs are not those of this step"
        others = leaves(extras)
        if not others:
            if placed.source is not None and placed.target is not None:
                self._copy(placed.source, placed.target)
            return placed.on_device, extras
        return placed.on_device, self._uploaded_with(placed, extras, others)

    def _uploaded_with(self, placed: "_Placed", extras: Any, arrays: list[NDArray[Any]]) -> Any:
        """Uploads the inputs with these arrays after them, or in a copy of their own if they do not fit."""
        begin = 0 if placed.source is None else placed.source.numel()
        end = begin + num_words(arrays)
        host, buffer = self._hosts[self._next], self._buffer
        if end > self._buffer.numel():
            if placed.source is not None and placed.target is not None:
                self._copy(placed.source, placed.target)
                self._wait_for_buffer()
            begin, end = 0, end - begin
            host, buffer = self._enlarged(end)
        pack(arrays, host.numpy()[begin:])
        self._copy(host[:end], buffer[:end])
        views = unpack(arrays, buffer[begin:])
        return mapped(extras, lambda _: next(views))

    def _enlarged(self, num: int) -> tuple[Tensor, Tensor]:
        """Returns a host buffer and a buffer on the device that hold `num` words and no inputs."""
        if num > self._overflow.numel():
            self._overflow = torch.zeros(1 << num.bit_length(), dtype=torch.int64, device=self._device)
        # Apart from the buffers of inputs, in which the inputs of each shape have their places.
        if num > self._spares[self._next].numel():
            self._spares[self._next] = self._host_buffer(1 << num.bit_length())
        return self._spares[self._next], self._overflow

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Starts the copy and moves on to the next host buffer."""
        target.copy_(source, non_blocking=True)
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
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]
