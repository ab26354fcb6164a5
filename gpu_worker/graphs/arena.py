"""The memory of captured steps of a CPU: blocks that a capture takes and gives back, at addresses that stay.

Every capture may use all of it, because a step's values are not needed when the next step begins. Owns the blocks and
who uses them.
"""

import weakref
from bisect import bisect_left, insort

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.attention.kv_cache import huge_zeros

# A cache line, so that vectors of two blocks share none.
_ALIGNMENT = 64
# Of huge pages.
_CHUNK_BYTES = 2 << 20


class Arena:
    """Chunks of memory, each divided into blocks that are used or free."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        # Blocks that tensors use.
        self.num_used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.memory.nbytes for chunk in self._chunks)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and type with undefined values. Its block is free again when the last
        tensor on its storage is gone."""
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = -(-max(span, 1) * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        block = torch.from_numpy(self._block(num_bytes)).view(tensor.dtype)
        return block.as_strided(tensor.shape, tensor.stride())

    def borrowed(self, tensor: Tensor) -> Tensor | None:
        """A tensor on the same memory that does not keep the block in use; None if the memory is not the arena's."""
        address = tensor.data_ptr()
        for chunk in self._chunks:
            begin = address - chunk.address
            if 0 <= begin < chunk.memory.nbytes:
                words = torch.from_numpy(chunk.memory[begin - begin % _ALIGNMENT :]).view(tensor.dtype)
                offset = begin % _ALIGNMENT // tensor.itemsize
                return words.as_strided(tensor.shape, tensor.stride(), offset)
        return None

    def _block(self, num_bytes: int) -> NDArray[np.uint8]:
        for chunk in self._chunks:
            if (block := chunk.take(num_bytes)) is not None:
                break
        else:
            chunk = _Chunk(-(-num_bytes // _CHUNK_BYTES) * _CHUNK_BYTES)
            self._chunks.append(chunk)
            block = chunk.take(num_bytes)
            assert block is not None
        self.num_used += 1
        # The storage of a tensor made from the array keeps the array.
        weakref.finalize(block, self._give_back, chunk, block.ctypes.data, num_bytes).atexit = False
        return block

    def _give_back(self, chunk: "_Chunk", address: int, num_bytes: int) -> None:
        chunk.give_back(address - chunk.address, num_bytes)
        self.num_used -= 1


class _Chunk:
    """Memory whose address stays."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: NDArray[np.uint8] = huge_zeros((num_bytes,), torch.uint8).numpy()
        self.address = self.memory.ctypes.data
        # Free blocks: (begin, end), ascending, none next to another.
        self._free = [(0, num_bytes)]

    def take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """The first free block that is large enough; None if there is none."""
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                self._free[i : i + 1] = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                return self.memory[begin : begin + num_bytes]
        return None

    def give_back(self, begin: int, num_bytes: int) -> None:
        """Frees a block, and joins it with free neighbours."""
        end = begin + num_bytes
        i = bisect_left(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == begin:
            begin = self._free.pop(i - 1)[0]
        insort(self._free, (begin, end))
