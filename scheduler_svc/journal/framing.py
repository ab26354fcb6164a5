"""The format of a journal file: a first line with the version, then frames with checksums. Owns no state.

A frame is the payload's length, the payload's CRC-32 and the CRC-32 of these 8 bytes, as little-endian uint32, then the
payload. Two checksums tell two kinds of damage apart. A writer that was killed leaves a prefix of a frame (`TORN`): the
frame's tokens had not been sent. Anything else that does not fit its checksums (`DAMAGED`) was written once and has
changed since.
"""

import errno
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from zlib import crc32

VERSION = 1
FIRST_LINE = b"tandem journal %d\n" % VERSION
_ANY_VERSION = b"tandem journal "
MAX_PAYLOAD = 1 << 28
_SIZES = struct.Struct("<II")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _SIZES.size + _CHECK.size


class ForeignFileError(ValueError):
    """The file is not a journal of this version; the message says what it is."""


class Tail(StrEnum):
    """How a file ends."""

    WHOLE = "whole"
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far a file can be read: `end` is the offset after the last good frame."""

    end: int
    tail: Tail


def frame(payload: bytes) -> bytes:
    """Returns the payload as a frame. Raises OSError if it is longer than a reader takes."""
    if len(payload) > MAX_PAYLOAD:
        what = f"a record has {len(payload):,} bytes; the limit is {MAX_PAYLOAD:,}"
        raise OSError(errno.EFBIG, what)
    sizes = _SIZES.pack(len(payload), crc32(payload))
    return sizes + _CHECK.pack(crc32(sizes)) + payload


def check_first_line(data: "bytes | mmap.mmap") -> bool:
    """Returns whether the first line is complete. Raises ForeignFileError if it is not of this version.

    It is incomplete if the file is empty or ends within it.
    """
    start = bytes(data[: len(FIRST_LINE)])
    if start == FIRST_LINE:
        return True
    if FIRST_LINE.startswith(start):
        return False
    if start.startswith(_ANY_VERSION):
        found = bytes(data[len(_ANY_VERSION) : len(_ANY_VERSION) + 20]).split(b"\n")[0].decode("ascii", "replace")
        raise ForeignFileError(f"has format {found}; this program reads format {VERSION} only")
    raise ForeignFileError("is not a journal")


class Frames:
    """Iterates over the payloads after the first line; `extent` is known at the end."""

    def __init__(self, data: "bytes | mmap.mmap") -> None:
        """`data` begins with the first line (`check_first_line`)."""
        self._data = data
        self.extent = Extent(end=len(FIRST_LINE), tail=Tail.WHOLE)

    def __iter__(self) -> Iterator[bytes]:
        data, at, size = self._data, len(FIRST_LINE), len(self._data)
        tail = Tail.WHOLE
        while at < size:
            body = at + HEADER_BYTES
            if body > size:
                tail = Tail.TORN
                break
            sizes = data[at : at + _SIZES.size]
            length, checksum = _SIZES.unpack(sizes)
            if _CHECK.unpack(data[at + _SIZES.size : body])[0] != crc32(sizes) or length > MAX_PAYLOAD:
                tail = Tail.DAMAGED
                break
            if body + length > size:
                tail = Tail.TORN
                break
            payload = data[body : body + length]
            if crc32(payload) != checksum:
                tail = Tail.DAMAGED
                break
            at = body + length
            yield payload
        self.extent = Extent(end=at, tail=tail)
