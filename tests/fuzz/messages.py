"""Random bytes for a protobuf message: valid, mutated and meaningless ones, drawn from a seed.

Owns the generator and the count of the fields that it has set. It is driven by descriptors alone, so a new field is
covered as soon as the proto has it. (Hypothesis draws some hundred such messages per second, and
libprotobuf-mutator has no Python package; this draws some ten thousand.)
"""

import math
import random
import struct
from collections.abc import Iterator
from typing import Any, cast

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_MAX_DEPTH = 5
_FIELD_SHARE = 0.3
_SMALL = tuple(range(10))
_EDGES: dict[int, tuple[float, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (-1, 2**31 - 1, -(2**31), 1001, -1001),
    FieldDescriptor.CPPTYPE_UINT32: (2**31 - 1, 2**31, 2**32 - 1, 255, 256, 65_536),
    FieldDescriptor.CPPTYPE_INT64: (-1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT64: (2**32, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: (-1.0, 0.5, 1e-45, 3.4e38, math.inf, -math.inf, math.nan, -0.0),
    FieldDescriptor.CPPTYPE_DOUBLE: (-1.0, 0.5, 5e-324, 1.7e308, math.inf, -math.inf, math.nan, 600.0, 86_400.0),
}
_TEXTS = (
    "",
    "a",
    "Return the",
    "é日😀",
    "\0",
    "\x1b[2J",
    "a" * 128,
    "a" * 129,
    "x" * 5000,
    "chaos-1",
    "\n\n",
    "\ufeff",
)
_INT32S = struct.Struct("<i")
_INT_EDGES = (0, 1, 2, 3, 255, -1, 2**31 - 1, -(2**31))


class MessageMaker:
    """Makes messages of one kind. `covered` has the full names of all fields that were set."""

    def __init__(self, kind: type[Message], rng: random.Random) -> None:
        self.covered: set[str] = set()
        self._descriptor = cast(Descriptor, kind.DESCRIPTOR)
        self._rng = rng
        # Frames made before, from which a mutation takes pieces.
        self._kept: list[bytes] = [b""]

    def fields(self) -> set[str]:
        """The full names of all fields that a message of this kind may contain, down to the depth that is drawn."""
        return {field.full_name for field in _fields(self._descriptor, 0)}

    def message(self) -> Message:
        """A message with fields of the right types and any values."""
        return self._fill(self._descriptor, 0)

    def frame(self) -> bytes:
        """A valid message, a mutated one, or random bytes."""
        rng, kind = self._rng, self._rng.random()
        if kind < 0.05:
            return rng.randbytes(rng.choice([0, 1, 2, 7, 30, 300]))
        if kind < 0.45 or len(self._kept) < 50:
            frame = self.message().SerializeToString()
            self.keep(frame)
            return frame
        return self.mutated(rng.choice(self._kept))

    def keep(self, frame: bytes) -> None:
        """Adds a frame to those that are mutated."""
        if len(self._kept) < 2000:
            self._kept.append(frame)
        else:
            self._kept[self._rng.randrange(2000)] = frame

    def mutated(self, frame: bytes) -> bytes:
        """The frame with one to six small changes."""
        rng, data = self._rng, bytearray(frame)
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            at = rng.randrange(len(data) + 1)
            end = min(len(data), at + rng.choice([1, 1, 2, 4, 16]))
            match rng.randrange(7):
                case 0 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 1 if at < len(data):
                    data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
                case 2:
                    data[at:at] = rng.randbytes(rng.choice([1, 1, 4, 12]))
                case 3:
                    del data[at:end]
                case 4:
                    data[at:at] = data[at:end]
                case 5:
                    del data[at:]
                case _:
                    other = rng.choice(self._kept)
                    data[at:] = other[rng.randrange(len(other) + 1) :]
        return bytes(data)

    def _fill(self, descriptor: Descriptor, depth: int) -> Message:
        message, rng = message_factory.GetMessageClass(descriptor)(), self._rng
        fields = descriptor.fields
        if descriptor.oneofs and len(descriptor.oneofs[0].fields) == len(fields):
            # A message that is one of many kinds: draw the kind.
            fields = [rng.choice(fields)]
        elif depth == 0 and rng.random() < 0.1:
            fields = [rng.choice(fields)] if fields else []
        share = _FIELD_SHARE if len(fields) > 1 else 0.95
        for field in fields:
            if rng.random() < share:
                self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if is_message and depth >= _MAX_DEPTH:
            return
        self.covered.add(field.full_name)
        if not field.is_repeated:
            if is_message:
                getattr(message, field.name).CopyFrom(self._fill(cast(Descriptor, field.message_type), depth + 1))
            else:
                setattr(message, field.name, self._value(field))
            return
        count = self._rng.choice([0, 1, 1, 2, 3, 5]) if self._rng.random() < 0.995 else 3000
        values: Any = getattr(message, field.name)
        if is_message and field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            self.covered |= {key.full_name, value.full_name}
            for _ in range(min(count, 100)):
                values[self._value(key)] = self._value(value)
        elif is_message:
            for _ in range(min(count, 20)):
                values.add().CopyFrom(self._fill(cast(Descriptor, field.message_type), depth + 1))
        else:
            values.extend(self._value(field) for _ in range(count))

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                # Proto3 enums are open: any int32 is valid on the wire.
                return rng.choice([*(value.number for value in cast(Any, field.enum_type).values), 99])
            case FieldDescriptor.CPPTYPE_STRING:
                return self._bytes() if field.type == FieldDescriptor.TYPE_BYTES else rng.choice(_TEXTS)
            case kind:
                return rng.choice(_SMALL) if rng.random() < 0.6 else rng.choice(_EDGES[kind])

    def _bytes(self) -> bytes:
        """Mostly an array of int32, because most byte fields are one."""
        rng = self._rng
        if rng.random() < 0.2:
            return rng.randbytes(rng.choice([0, 1, 3, 16, 32, 33]))
        count = rng.choice([0, 1, 1, 2, 3, 8])
        return b"".join(_INT32S.pack(rng.choice(_INT_EDGES)) for _ in range(count))


def _fields(descriptor: Descriptor, depth: int) -> Iterator[FieldDescriptor]:
    for field in descriptor.fields:
        yield field
        if field.message_type is not None and depth < _MAX_DEPTH:
            yield from _fields(field.message_type, depth + 1)
