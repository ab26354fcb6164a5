"""Types of arrays, as annotations name them, and memory for arrays that are filled on the host. Imports no torch."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem_contract.plural import numbered

Int64Array = NDArray[np.int64]
HostArray = NDArray[Any]
# HostArray on the host or Tensor on the device: dataclasses that are uploaded as a whole are generic in it.
Array = TypeVar("Array")


class Space:
    """Hands out arrays, one after another in a buffer, or new ones. Their contents are undefined."""

    def __init__(self, words: Int64Array | None = None) -> None:
        """`words`: the buffer; None: every array has memory of its own."""
        self._words = words
        self._floats = None if words is None else words.view(np.float32)
        # 8-byte words handed out.
        self.used = 0

    def int64(self, size: int) -> Int64Array:
        """An array [size]. Raises MemoryError if the buffer has no room."""
        begin = self._take(size)
        return np.empty(size, np.int64) if self._words is None else self._words[begin : begin + size]

    def float32(self, size: int) -> NDArray[np.float32]:
        """An array [size], aligned to 8 bytes. Raises MemoryError if the buffer has no room."""
        begin = 2 * self._take((size + 1) // 2)
        return np.empty(size, np.float32) if self._floats is None else self._floats[begin : begin + size]

    def _take(self, num_words: int) -> int:
        begin = self.used
        self.used = begin + num_words
        if self._words is not None and self.used > self._words.size:
            raise MemoryError(f"{numbered(self.used, 'word', 'do')} not fit in a buffer of {self._words.size}")
        return begin
