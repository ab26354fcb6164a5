"""Files of records: a first line with the file's kind and version, then frames. Owns no file.

A frame is the payload's length, the payload's CRC-32 and the CRC-32 of these 8 bytes, as little-endian uint32, then the
payload: a message that says its kind. Two checksums distinguish two kinds of damage. A writer that was killed leaves a
prefix of a frame (`TORN`). Anything else that does not fit its checksums (`DAMAGED`) was written once and has changed
since.
"""

import errno
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from zlib import crc32

MAX_PAYLOAD = 1 << 28
_SIZES = struct.Struct("<II")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _SIZES.size + _CHECK.size
Data = bytes | mmap.mmap


class ForeignFileError(ValueError):
    """The file is of another kind or version; the message says what it is."""


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


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file, in one word, and its version."""

    name: str
    version: int

    @property
    def first_line(self) -> bytes:
        """What a file begins with."""
        return b"tandem %s %d\n" % (self.name.encode(), self.version)

    def begins(self, data: Data) -> bool:
        """Returns whether the first line is complete. Raises ForeignFileError if it is not of this kind and version.

        It is incomplete if the file is empty or ends within it.
        """
        start, any_version = bytes(data[: len(self.first_line)]), b"tandem %s " % self.name.encode()
        if start == self.first_line:
            return True
        if self.first_line.startswith(start):
            return False
        if start.startswith(any_version):
            version = bytes(data[len(any_version) : len(any_version) + 20]).split(b"\n")[0].decode("ascii", "replace")
            raise ForeignFileError(f"has format {version}; this program reads format {self.version} only")
        raise ForeignFileError(f"is not a {self.name}")


def frame(payload: bytes) -> bytes:
    """Returns the payload as a frame. Raises OSError if it is longer than a reader takes."""
    if len(payload) > MAX_PAYLOAD:
        what = f"a record has {len(payload):,} bytes; the limit is {MAX_PAYLOAD:,}"
        raise OSError(errno.EFBIG, what)
    sizes = _SIZES.pack(len(payload), crc32(payload))
    return sizes + _CHECK.pack(crc32(sizes)) + payload


class Frames:
    """Iterates over the payloads after the first line; `extent` is known at the end."""

    def __init__(self, data: Data, of: Format) -> None:
        """`data` begins with the first line (`Format.begins`)."""
        self._data = data
        self.extent = Extent(end=len(of.first_line), tail=Tail.WHOLE)

    def __iter__(self) -> Iterator[bytes]:
        data, at, size = self._data, self.extent.end, len(self._data)
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
