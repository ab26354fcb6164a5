"""The memory that a worker and its mask server share: masks, output tokens, and how far the server is.

Owns the layout. The worker makes the memory and writes output tokens; the server writes masks and its progress. Pages
that nobody has written take no memory.
"""

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PAGE = 4096
# Of the main thread: a count of changes; what is computed (a row, or OF_CONSTRAINT - id), and at which output token. Of
# the thread that prepares: a count of changes, and the constraint's id or -1.
COUNT, SUBJECT, TOKEN, PREPARE_COUNT, PREPARED = range(5)
_NUM_PROGRESS = 5
# The subject while nothing is computed; constraint `id` is the subject OF_CONSTRAINT - id.
IDLE, OF_CONSTRAINT = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the memory. Rows are 1..max_rows."""

    max_rows: int
    vocab_size: int
    # Output tokens of a row.
    max_length: int

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.vocab_size // 32)

    @property
    def _masks(self) -> int:
        return _aligned(4 * (self.max_rows + 1) * self.mask_words)

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return _PAGE + self._masks + _aligned(4 * (self.max_rows + 1) * self.max_length)

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Where progress, masks and output tokens begin, in bytes."""
        return 0, _PAGE, _PAGE + self._masks


class SharedArea:
    """Views of the memory behind a descriptor."""

    def __init__(self, descriptor: int, sizes: Sizes) -> None:
        """Maps the memory; the caller keeps the descriptor. Raises OSError or ValueError if it is too small."""
        self.sizes = sizes
        memory = mmap.mmap(descriptor, sizes.num_bytes)
        progress, masks, tokens = sizes.offsets
        num_rows = sizes.max_rows + 1
        # int64 [5].
        self.progress: NDArray[np.int64] = np.frombuffer(memory, np.int64, _NUM_PROGRESS, progress)
        # int32 [rows, words]: bit t of a row, from the lowest bit of word 0 on, is whether token t may come next.
        shape = (num_rows, sizes.mask_words)
        self.masks: NDArray[np.int32] = np.frombuffer(memory, np.int32, shape[0] * shape[1], masks).reshape(shape)
        # int32 [rows, max_length]: the output tokens of each row.
        shape = (num_rows, sizes.max_length)
        self.tokens: NDArray[np.int32] = np.frombuffer(memory, np.int32, shape[0] * shape[1], tokens).reshape(shape)


def new_memory(sizes: Sizes) -> int:
    """A descriptor of new memory, all zeros. Raises OSError."""
    descriptor = os.memfd_create("tandem-masks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, sizes.num_bytes)
    return descriptor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
