"""The frames between a worker and its mask server: packets of little-endian int32, and texts in UTF-8.

Owns their layout and their limits. A packet is a frame: kind, number, and the payload.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpu_worker.constraints.area import MAX_ENTRIES

_HEAD, _SERVING = struct.Struct("<ii"), struct.Struct("<id")
_ENTRY, _COUNT_BYTES = np.dtype("<i4"), 4
# The largest source of a constraint, and the largest text of an error.
MAX_SOURCE_BYTES, _MAX_DETAIL_BYTES = 65_536, 1_000
# Rows of one request: 2,048, so that a packet fits into the buffer of a socket.
MAX_ROWS = MAX_ENTRIES
MAX_BYTES = _HEAD.size + MAX_SOURCE_BYTES


class Kind(IntEnum):
    """What a frame says. `number` is the constraint's id, that of the request, or of a process."""

    # To the server: a constraint's source, compiled beside other work; or at once, before the next frame.
    PREPARE = 1
    DEFINE = 2
    DROP = 3
    # Rows whose masks are wanted: their entries are (row, start, constraint, number of output tokens).
    ADVANCE = 4
    # To the worker: the constraint is ready, or the text says why it is not.
    PREPARED = 5
    # The rows of a request have taken their tokens, or have their masks; their states.
    TAKEN = 6
    MASKED = 7
    # The first frame of a server, whose process `number` is: from now on it shows its progress (`serving`).
    SERVING = 8


class RowState(IntEnum):
    """What the server says of a row."""

    OPEN = 0
    # Nothing can follow its output.
    COMPLETE = 1
    # The text says why.
    FAILED = 2


_ADVANCE_FIELDS = 4


class FrameError(ValueError):
    """A packet that is no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One packet."""

    kind: Kind
    number: int
    payload: bytes = b""

    def encoded(self) -> bytes:
        """The packet."""
        return _HEAD.pack(self.kind, self.number) + self.payload

    @property
    def text(self) -> str:
        """The payload of a PREPARED, empty if there was no error."""
        return self.payload.decode("utf-8", "replace")

    def entries(self) -> NDArray[np.int32]:
        """The rows of an ADVANCE, int32 [n, 4]. Raises FrameError."""
        size = 4 * _ADVANCE_FIELDS
        if len(self.payload) % size:
            raise FrameError(f"{self.kind.name} has {len(self.payload)} bytes; an entry has {size}")
        return np.frombuffer(self.payload, _ENTRY).reshape(-1, _ADVANCE_FIELDS)

    def of_serving(self) -> tuple[int, float]:
        """The thread and the slowness of a SERVING. Raises FrameError."""
        if len(self.payload) != _SERVING.size:
            raise FrameError(f"{self.kind.name} has {len(self.payload)} bytes; it must have {_SERVING.size}")
        thread, slowness = _SERVING.unpack(self.payload)
        return thread, slowness

    def states(self) -> tuple[list[int], str]:
        """The states of a TAKEN or MASKED, and the text of the first row that failed. Raises FrameError."""
        num = int.from_bytes(self.payload[:_COUNT_BYTES], "little")
        end = _COUNT_BYTES + num
        if len(self.payload) < end:
            raise FrameError(f"{self.kind.name} has {len(self.payload)} bytes; {num} rows need {end}")
        return list(self.payload[_COUNT_BYTES:end]), self.payload[end:].decode("utf-8", "replace")


def decoded(packet: bytes) -> Frame:
    """Raises FrameError."""
    if not _HEAD.size <= len(packet) <= MAX_BYTES:
        raise FrameError(f"a packet has {len(packet)} bytes; it must have {_HEAD.size} to {MAX_BYTES}")
    kind, number = _HEAD.unpack_from(packet)
    try:
        return Frame(Kind(kind), number, packet[_HEAD.size :])
    except ValueError:
        raise FrameError(f"{kind} is not a kind of frame") from None


def advance(number: int, entries: Sequence[tuple[int, int, int, int]]) -> Frame:
    """A request for masks."""
    return Frame(Kind.ADVANCE, number, np.array(entries, _ENTRY).tobytes())


def serving(process: int, preparing_thread: int, slowness: float) -> Frame:
    """The first frame of a server: its thread that prepares, and the slowness of its machine."""
    return Frame(Kind.SERVING, process, _SERVING.pack(preparing_thread, slowness))


def states(kind: Kind, number: int, found: Sequence[int], detail: str) -> Frame:
    """The answer to a request: a state for each of its rows."""
    return Frame(kind, number, len(found).to_bytes(_COUNT_BYTES, "little") + bytes(found) + limited(detail))


def limited(text: str) -> bytes:
    """A text within its limit."""
    return text.encode("utf-8", "replace")[:_MAX_DETAIL_BYTES]
