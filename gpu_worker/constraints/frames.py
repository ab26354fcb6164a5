"""What passes between a worker and its mask server: frames, and the memory that both share.

Owns their layout and their limits. A frame is a packet of little-endian int32, and texts in UTF-8: kind, number, and
the payload. The memory has masks, output tokens, and how far the server is. The worker makes it and writes output
tokens; the server writes masks and its progress. Pages that were never written take no memory.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tandem_contract.plural import numbered

# What the main thread does (`Work`), and the id of the constraint that the other thread prepares, 0 for none. Each word
# is all that is said of its thread, so a reader between two writes sees nothing that never was.
WORK, PREPARED = range(2)
_NUM_PROGRESS = 2
# The bits of a Work, from the lowest on: token, entry, stage, number.
_TOKEN_BITS, _ENTRY_BITS, _STAGE_BITS = 20, 11, 2
_LAST_TOKEN, _ENTRY_MASK, _STAGE_MASK = (1 << _TOKEN_BITS) - 1, (1 << _ENTRY_BITS) - 1, (1 << _STAGE_BITS) - 1
_STAGE_SHIFT = _TOKEN_BITS + _ENTRY_BITS
_NUMBER_SHIFT = _STAGE_SHIFT + _STAGE_BITS
# Rows of one request: 2,048, so that a packet fits into the buffer of a socket. Numbers of frames are int32.
MAX_ENTRIES, MAX_NUMBER = 1 << _ENTRY_BITS, (1 << 31) - 1
_HEAD = struct.Struct("<ii")
# The payload of SERVING: the thread that prepares, and the slowness of the machine.
SERVING = struct.Struct("<id")
_ENTRY = np.dtype("<i4")
# The largest source of a constraint, and the largest text of an error.
MAX_SOURCE_BYTES, _MAX_DETAIL_BYTES = 65_536, 1_000
MAX_BYTES = _HEAD.size + MAX_SOURCE_BYTES


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
        return cls(
            Stage(word >> _STAGE_SHIFT & _STAGE_MASK),
            word >> _NUMBER_SHIFT,
            word >> _TOKEN_BITS & _ENTRY_MASK,
            word & _LAST_TOKEN,
        )


def work_word(stage: Stage, number: int, entry: int = 0, token: int = 0) -> int:
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
    def num_bytes(self) -> int:
        return 8 * _NUM_PROGRESS + 4 * (self.max_rows + 1) * (self.mask_words + self.max_length)


class SharedArea:
    """Views of the memory behind a descriptor."""

    def __init__(self, descriptor: int, sizes: Sizes) -> None:
        """Maps the memory; the caller keeps the descriptor. Raises OSError or ValueError if it is too small."""
        memory = mmap.mmap(descriptor, sizes.num_bytes)
        num_rows = sizes.max_rows + 1
        # uint64 [2].
        self.progress: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, _NUM_PROGRESS)
        # int32 [rows, words]: bit t of a row, from the lowest bit of word 0 on, is whether token t may come next.
        masks = np.frombuffer(memory, np.int32, num_rows * sizes.mask_words, self.progress.nbytes)
        self.masks: NDArray[np.int32] = masks.reshape(num_rows, -1)
        # int32 [rows, max_length]: the output tokens of each row.
        tokens = np.frombuffer(memory, np.int32, offset=self.progress.nbytes + masks.nbytes)
        self.tokens: NDArray[np.int32] = tokens.reshape(num_rows, -1)


def new_memory(sizes: Sizes) -> int:
    """A descriptor of new memory, all zeros. Raises OSError."""
    descriptor = os.memfd_create("tandem-masks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, sizes.num_bytes)
    return descriptor


class Kind(IntEnum):
    """What a frame says. `number` is the constraint's id, that of the request, or of a process."""

    # To the server: a constraint's source, compiled beside other work; or at once, before the next frame.
    PREPARE = 1
    DEFINE = 2
    DROP = 3
    # Rows that need masks: their entries are (row, start, constraint, number of output tokens).
    ADVANCE = 4
    # To the worker: the constraint is ready, or the text says why it is not.
    PREPARED = 5
    # The rows of a request have taken their tokens, or have their masks; their states.
    TAKEN = 6
    MASKED = 7
    # The first frame of a server, with the `number` of its process: from now on it shows its progress.
    SERVING = 8


class Fate(IntEnum):
    """Whether masks are still computed for a row. What the server says, and the last one, which the worker knows."""

    OPEN = 0
    # Nothing can follow its output.
    COMPLETE = 1
    # The text says why.
    FAILED = 2
    # It has an EOS token, or another sequence has the row.
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Frame:
    """One packet."""

    kind: Kind
    number: int
    payload: bytes = b""

    def encoded(self) -> bytes:
        return _HEAD.pack(self.kind, self.number) + self.payload

    def entries(self) -> NDArray[np.int32]:
        """The rows of an ADVANCE, int32 [n, 4]."""
        return np.frombuffer(self.payload, _ENTRY).reshape(-1, 4)

    def states(self, num_rows: int) -> tuple[list[int], str]:
        """The states of a TAKEN or MASKED for so many rows, and why the first one failed. Raises ValueError."""
        if len(self.payload) < num_rows:
            what = f"{self.kind.name} has {numbered(len(self.payload), 'byte')}"
            raise ValueError(f"{what}; {numbered(num_rows, 'row', 'need')} {num_rows}")
        return list(self.payload[:num_rows]), self.payload[num_rows:].decode("utf-8", "replace")


def decoded(packet: bytes) -> Frame:
    """Raises ValueError."""
    if not _HEAD.size <= len(packet) <= MAX_BYTES:
        raise ValueError(f"a packet has {numbered(len(packet), 'byte')}; it must have {_HEAD.size} to {MAX_BYTES}")
    kind, number = _HEAD.unpack_from(packet)
    return Frame(Kind(kind), number, packet[_HEAD.size :])


def advance(number: int, entries: Sequence[tuple[int, int, int, int]]) -> Frame:
    return Frame(Kind.ADVANCE, number, np.array(entries, _ENTRY).tobytes())


def states(kind: Kind, number: int, values: Sequence[int], detail: str) -> Frame:
    """The answer to a request: a state for each of its rows."""
    return Frame(kind, number, bytes(values) + limited(detail))


def limited(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:_MAX_DETAIL_BYTES]
