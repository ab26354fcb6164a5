"""Owns the walk over a message's bytes that refuses it before it is parsed. Knows nothing of what fields mean.

The parser of protobuf takes memory for each field that it meets: 500,000 stop strings of one letter take it 14 ms and
21 MB. This walk stops at the first entry beyond a limit, so its work is bounded by the limits, not by the message. It
implements the wire format of protobuf (protobuf.dev/programming-guides/encoding).
"""

import numpy as np
from google.protobuf.descriptor import Descriptor

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import MAX_CHAR_BYTES, NO_MODEL, Rule, Rules, Sizes, refuse, rules_of
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


class Scan:
    """The walk over messages of one kind."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._root = rules_of(descriptor)
        self._begin(b"", NO_MODEL)

    def _begin(self, data: bytes, sizes: Sizes) -> None:
        self._data, self._sizes = data, sizes
        # Fields that the walk has visited, and those besides the entries of lists.
        self.num_visited = self._num_single = 0
        self._max_single = MAX_SINGLE_FIELDS
        # Entries of each list, and pieces of each list of numbers.
        self._counts: dict[str, int] = {}
        self._pieces: dict[str, int] = {}

    def check(self, data: bytes, sizes: Sizes) -> None:
        """Refuses a message with a list, string or field beyond its limit. Raises Refusal (INVALID_ARGUMENT)."""
        self._begin(data, sizes)
        try:
            self._walk(self._root, 0, len(data))
        except (_MalformedError, IndexError):
            # The bytes before were within the limits, so the parser takes no more memory than they allow.
            return
        finally:
            self._data = b""

    def _walk(self, message: Rules, at: int, end: int) -> None:
        while at < end:
            tag, at = self._varint(at)
            self.num_visited += 1
            wire, rule = tag & 7, message.fields.get(tag >> 3)
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
            # Encoders write a list of numbers as bytes.
            is_known = rule is not None and (
                wire == _BYTES if rule.has_bytes else wire != _GROUP and (wire != _BYTES or rule.is_list)
            )
            if rule is None or not is_known or wire == _GROUP_END:
                raise status.invalid(
                    f"{message.name}.{tag >> 3}",
                    f"{message.name} has field number {tag >> 3}, which this server does not know",
                )
            if rule.is_list:
                self._check_list(rule, at, size, is_packed=not rule.has_bytes and wire == _BYTES)
            else:
                self._check_single(rule, at, size)
            at += size

    def _check_single(self, rule: Rule, at: int, size: int) -> None:
        self._num_single += 1
        if self._num_single > self._max_single:
            refuse(rule.path, f"comes after {numbered(self._max_single, 'other field')}", self._max_single)
        if rule.bytes and size > rule.bytes:
            refuse(rule.path, f"has {counted(size, 'byte')}", rule.bytes)
        if rule.inside is not None:
            self._walk(rule.inside, at, at + size)
        elif rule.chars and size > MAX_CHAR_BYTES * (most := self._sizes.number(rule.chars)):
            refuse(rule.path, f"has {counted(size, 'byte')}", f"{counted(most, 'character')}")

    def _check_list(self, rule: Rule, at: int, size: int, *, is_packed: bool) -> None:
        most, count = self._sizes.number(rule.entries), 1
        if not rule.has_bytes:
            pieces = self._pieces[rule.path] = self._pieces.get(rule.path, 0) + 1
            if pieces > MAX_PIECES:
                what = f"has more than {MAX_PIECES:,} pieces that are not packed together"
                refuse(rule.path, what, f"{MAX_PIECES:,}")
        if is_packed:
            # The last byte of each number has no highest bit.
            count = int(np.count_nonzero(np.frombuffer(self._data, np.int8, size, at) >= 0)) if size else 0
        elif rule.bytes or rule.chars:
            most_bytes = rule.bytes or MAX_CHAR_BYTES * self._sizes.number(rule.chars)
            if size > most_bytes:
                refuse(rule.path, f"has an entry of {counted(size, 'byte')}", f"{most_bytes:,}")
        total = self._counts[rule.path] = self._counts.get(rule.path, 0) + count
        if total > most:
            number = f"{total:,}" if is_packed else f"more than {most:,}"
            refuse(rule.path, f"is {number} long", f"{most:,}")
        if rule.inside is not None:
            outside = self._num_single, self._max_single
            self._num_single, self._max_single = 0, MAX_FIELDS_OF_ENTRY
            self._walk(rule.inside, at, at + size)
            self._num_single, self._max_single = outside

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
