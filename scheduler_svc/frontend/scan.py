"""Owns the walk over a message's bytes that refuses it before it is parsed. Knows nothing of what fields mean.

The parser of protobuf takes memory for each field that it meets: 500,000 stop strings of one letter take it 14 ms and
21 MB. This walk stops at the first entry beyond a limit, so its work is bounded by the limits, not by the message. It
implements the wire format of protobuf (protobuf.dev/programming-guides/encoding).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import LIMITS, MAX_CHAR_BYTES, Limit, Of, Sizes, refuse
from tandem_contract.plural import counted, numbered

# The parser takes at most 0.1 ms for a smaller message.
MIN_BYTES = 4096
# Fields of one message besides the entries of lists; the largest request has some 40.
MAX_SINGLE_FIELDS = 256
# The same of one entry of a list of messages; a message of a chat has 4.
MAX_FIELDS_OF_ENTRY = 8
# Pieces of one list of numbers. Encoders write one, with all numbers packed; a piece may be a single number too.
MAX_PIECES = 4096
_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


class _MalformedError(Exception):
    """The parser will refuse these bytes, and say so."""


@dataclass(frozen=True, slots=True)
class _Field:
    """What the walk knows of a field. `inside` has the fields of a message; `is_packed`: a list of numbers.

    The entries of a list of messages have `inside` if the table has limits for their fields.
    """

    path: str
    limit: Limit
    has_bytes: bool
    is_packed: bool
    inside: "_Message | None"


@dataclass(frozen=True, slots=True)
class _Message:
    """The fields of a message by their numbers."""

    name: str
    fields: Mapping[int, _Field]


def _message(descriptor: Any, limits: Mapping[str, Limit], above: str = "") -> _Message:
    fields: dict[int, _Field] = {}
    for field in descriptor.fields:
        path, is_message = above + field.name, field.message_type is not None
        has_bytes = is_message or field.type in (field.TYPE_STRING, field.TYPE_BYTES)
        has_limits = any(each.startswith(f"{path}.") for each in limits) or not field.is_repeated
        inside = _message(field.message_type, limits, f"{path}.") if is_message and has_limits else None
        is_packed = field.is_repeated and not has_bytes
        # Packed numbers are counted as varints.
        varints = field.TYPE_UINT32, field.TYPE_INT32, field.TYPE_UINT64, field.TYPE_ENUM
        assert not is_packed or field.type in varints, path
        fields[field.number] = _Field(path, limits[path], has_bytes, is_packed, inside)
    return _Message(descriptor.name, fields)


class Scan:
    """The walk over messages of one kind."""

    def __init__(self, descriptor: Any) -> None:
        self._root = _message(descriptor, LIMITS[descriptor.full_name])
        # Fields that the last walk visited.
        self.num_visited = 0
        self._data = b""
        self._sizes = Sizes()
        self._num_single = 0
        self._max_single = MAX_SINGLE_FIELDS
        # Entries of each list, and pieces of each list of numbers.
        self._counts: dict[str, int] = {}
        self._pieces: dict[str, int] = {}

    def check(self, data: bytes, sizes: Sizes) -> None:
        """Refuses a message with a list, string or field beyond its limit. Raises Refusal (INVALID_ARGUMENT)."""
        self.num_visited = self._num_single = 0
        self._max_single = MAX_SINGLE_FIELDS
        self._counts.clear()
        self._pieces.clear()
        self._data, self._sizes = data, sizes
        try:
            self._walk(self._root, 0, len(data))
        except (_MalformedError, IndexError):
            # The bytes before were within the limits, so the parser takes no more memory than they allow.
            return
        finally:
            self._data = b""

    def _walk(self, message: _Message, at: int, end: int) -> None:
        while at < end:
            tag, at = self._varint(at)
            self.num_visited += 1
            wire, field = tag & 7, message.fields.get(tag >> 3)
            size = 0
            if wire == _BYTES:
                size, at = self._varint(at)
            elif wire == _VARINT:
                _, at = self._varint(at)
            elif wire in _FIXED_BYTES:
                at += _FIXED_BYTES[wire]
            elif wire not in (_GROUP, _GROUP_END):
                raise _MalformedError
            if at + size > end:
                raise _MalformedError
            is_known = field is not None and (
                wire == _BYTES if field.has_bytes else wire != _GROUP and (wire != _BYTES or field.is_packed)
            )
            if field is None or not is_known or wire == _GROUP_END:
                raise status.invalid(
                    f"{message.name}.{tag >> 3}",
                    f"{message.name} has field number {tag >> 3}, which this server does not know",
                )
            if field.limit.of == Of.ENTRIES:
                self._check_list(field, at, size, is_packed=field.is_packed and wire == _BYTES)
            else:
                self._check_single(field, message, at, size)
            at += size

    def _check_single(self, field: _Field, message: _Message, at: int, size: int) -> None:
        self._num_single += 1
        if self._num_single > self._max_single:
            refuse(field.path, f"comes after {numbered(self._max_single, 'other field')}", self._max_single)
        if field.inside is not None:
            self._walk(field.inside, at, at + size)
        elif field.limit.of == Of.BYTES:
            if size > (most := self._most(field.limit)):
                refuse(field.path, f"has {counted(size, 'byte')}", most)
        elif field.limit.of == Of.CHARACTERS and size > MAX_CHAR_BYTES * (most := self._most(field.limit)):
            refuse(field.path, f"has {counted(size, 'byte')}", f"{counted(most, 'character')}")

    def _check_list(self, field: _Field, at: int, size: int, *, is_packed: bool) -> None:
        most, count = self._most(field.limit), 1
        if field.is_packed:
            pieces = self._pieces[field.path] = self._pieces.get(field.path, 0) + 1
            if pieces > MAX_PIECES:
                what = f"has more than {MAX_PIECES:,} pieces that are not packed together"
                refuse(field.path, what, f"{MAX_PIECES:,}")
        if is_packed:
            # The last byte of each number has no highest bit.
            count = int(np.count_nonzero(np.frombuffer(self._data, np.int8, size, at) >= 0)) if size else 0
        elif field.inside is None and size > (most_bytes := self._each_bytes(field.limit)):
            refuse(field.path, f"has an entry of {counted(size, 'byte')}", f"{most_bytes:,}")
        total = self._counts[field.path] = self._counts.get(field.path, 0) + count
        if total > most:
            number = f"{total:,}" if is_packed else f"more than {most:,}"
            refuse(field.path, f"is {number} long", f"{most:,}")
        if field.inside is not None:
            outside = self._num_single, self._max_single
            self._num_single, self._max_single = 0, MAX_FIELDS_OF_ENTRY
            self._walk(field.inside, at, at + size)
            self._num_single, self._max_single = outside

    def _each_bytes(self, limit: Limit) -> int:
        each = limit.each_bytes
        return MAX_CHAR_BYTES * int(getattr(self._sizes, each)) if isinstance(each, str) else each

    def _most(self, limit: Limit) -> int:
        return int(getattr(self._sizes, limit.most) if isinstance(limit.most, str) else limit.most)

    def _varint(self, at: int) -> tuple[int, int]:
        byte = self._data[at]
        if byte < 128:
            return byte, at + 1
        value, shift = byte & 127, 7
        for position in range(at + 1, at + _MAX_VARINT_BYTES):
            byte = self._data[position]
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position + 1
            shift += 7
        raise _MalformedError
