"""A file of 24 bytes: a checking worker says in it whether a plan is in flight, and reads from it that it shall hang.

Owns the file's form, three little-endian uint64: the plans of the newest generation that the worker has received and
not answered, the results that it has sent since it joined, and, written by the test, 1 if the worker shall hang in its
next step. A plan counts only after it was received, and until just before its result is sent, so a worker that is
stopped while the count is above 0 has a plan in flight for certain. The core may know of more.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

_COUNTS = struct.Struct("<QQ")
_ORDER = struct.Struct("<Q")
_SIZE = _COUNTS.size + _ORDER.size


class InFlight(NamedTuple):
    unanswered: int
    answered: int


class InFlightWriter:
    """The worker's side."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    def write(self, unanswered: int, answered: int) -> None:
        _COUNTS.pack_into(self._memory, 0, unanswered, answered)

    @property
    def shall_hang(self) -> bool:
        return _ORDER.unpack_from(self._memory, _COUNTS.size) != (0,)


def read_in_flight(path: Path) -> InFlight:
    """The counts of a worker that is stopped or dead; zeros if it has not written any yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    return InFlight(*_COUNTS.unpack_from(data)) if len(data) == _SIZE else InFlight(0, 0)


def order_hang(path: Path) -> None:
    """Makes the worker hang as soon as it has a plan to compute. Raises FileNotFoundError before it has started."""
    with path.open("r+b") as file:
        file.seek(_COUNTS.size)
        file.write(_ORDER.pack(1))
