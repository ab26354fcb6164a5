"""The memory that a worker and its mask server share: masks, output tokens, and how far the server is.

Owns the layout. The worker makes the memory and writes output tokens; the server writes masks and its progress. Pages
that nobody has written take no memory.
"""

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

_PAGE = 4096
# What the main thread does (`Work`), and the id of the constraint that the other thread prepares, 0 for none. Each word
# is all that is said of its thread, so a reader between two writes sees nothing that never was.
WORK, PREPARED = range(2)
_NUM_PROGRESS = 2
# The bits of a Work, from the lowest on: token, entry, stage, number.
_TOKEN_BITS, _ENTRY_BITS, _STAGE_BITS = 20, 11, 2
_LAST_TOKEN, _ENTRY_MASK, _STAGE_MASK = (1 << _TOKEN_BITS) - 1, (1 << _ENTRY_BITS) - 1, (1 << _STAGE_BITS) - 1
_STAGE_SHIFT = _TOKEN_BITS + _ENTRY_BITS
_NUMBER_SHIFT = _STAGE_SHIFT + _STAGE_BITS
# Rows of one request. Numbers of frames are int32.
MAX_ENTRIES, MAX_NUMBER = 1 << _ENTRY_BITS, (1 << 31) - 1


class Stage(IntEnum):
    """What the main thread does; `Work.number` is that of the frame, which is answered, if it does nothing."""

    IDLE = 0
    # It compiles constraint `number`.
    DEFINE = 1
    # Row `entry` of request `number` takes tokens, or its mask is computed.
    TAKE = 2
    MASK = 3


@dataclass(frozen=True, slots=True)
class Work:
    """What the main thread does; another word is another piece of work."""

    stage: Stage
    number: int
    entry: int = 0
    # The number of the output token, from 1 on; those above 1,048,575 are that one.
    token: int = 0

    @classmethod
    def of(cls, word: int) -> Self:
        """Decodes a word."""
        return cls(
            Stage(word >> _STAGE_SHIFT & _STAGE_MASK),
            word >> _NUMBER_SHIFT,
            word >> _TOKEN_BITS & _ENTRY_MASK,
            word & _LAST_TOKEN,
        )


def work_word(stage: Stage, number: int, entry: int = 0, token: int = 0) -> int:
    """Encodes a Work."""
    head = number << _NUMBER_SHIFT | stage << _STAGE_SHIFT
    return head | entry << _TOKEN_BITS | (token if token < _LAST_TOKEN else _LAST_TOKEN)


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
        # uint64 [2].
        self.progress: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, _NUM_PROGRESS, progress)
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
