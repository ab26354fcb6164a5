"""Between protobuf messages and dataclasses: one declaration for each pair of classes, in both directions.

A `Codec` pairs the fields of both classes by their names, once, when it is made. What it does with a value follows from
the annotation of the dataclass and from the field of the message:

| dataclass | message |
|---|---|
| number, text, bytes | the same |
| an enum | an enum with members of the same names, after its own name: `WaitReason.QUEUE` is `WAIT_REASON_QUEUE` |
| an array, or a tuple of int | bytes: the elements, little-endian |
| a dataclass | a message, or the fields of this message that have its names |
| a tuple or frozenset of these | a repeated field |
| `None` | a field that is not set, or the zero of an enum |

A field that one class has alone must be declared (`given`, `made`, `sent`, `other`), or the codec cannot be made: so a
field that is added to one class alone fails at the first import. Bounds (`bounds`) are checked when a message is read.

Owns no state. Hostile bytes raise WireError and nothing else.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tandem_contract.bounds import Bound, WireError
from tandem_contract.plural import numbered

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")
_Element = TypeVar("_Element", bound=np.generic)
_Function = Callable[[Any], Any]
_NONE: Mapping[str, Any] = {}


def parsed(kind: type[_M], frame: bytes) -> _M:
    """Parses the frame. Raises WireError if it is malformed."""
    message = kind()
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise WireError(f"the message is not a {kind.DESCRIPTOR.name}: {error}") from None
    return message


def array(data: bytes, dtype: type[_Element], name: str) -> npt.NDArray[_Element]:
    """Returns a read-only array over the bytes. Raises WireError if they are not a multiple of the element size."""
    little = _little_endian(dtype)
    if len(data) % little.itemsize:
        raise WireError(f"{name} has {numbered(len(data), 'byte')}, which is not a multiple of {little.itemsize}")
    return np.frombuffer(data, little)


@cache
def _little_endian(dtype: type[np.generic]) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def packed(values: npt.NDArray[Any]) -> bytes:
    """Returns the array's elements as little-endian bytes."""
    if sys.byteorder == "big":
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return values.tobytes()


class Codec(Generic[_M, _T]):
    """Between a class of messages and a dataclass."""

    def __init__(
        self,
        message: type[_M],
        kind: type[_T],
        *,
        given: Collection[str] = (),
        names: Mapping[str, str] = _NONE,
        within: Collection[str] = (),
        made: Mapping[str, Callable[[_M], Any]] = _NONE,
        sent: Mapping[str, Callable[[_T], Any]] = _NONE,
        other: Collection[str] = (),
        parts: "Collection[Codec[Any, Any]]" = (),
        check: Callable[[_T], None] | None = None,
        is_whole: bool = True,
    ) -> None:
        """Raises TypeError if a field of one class has none of the other and is not declared.

        `given`: fields of the dataclass that do not travel; `decode` gets them, unless they have a default.
        `names`: fields of the dataclass with another name in the message.
        `within`: messages in this message that have fields of the dataclass.
        `made`: by field of the dataclass, what makes it of the message; its bounds hold, too.
        `sent`: by field of the message, what makes it of the dataclass; None leaves it unset.
        `other`: fields of the message that the dataclass does not have; all others if not `is_whole`.
        `parts`: codecs of dataclasses in this one that more than names decide.
        `check`: raises WireError if fields that were read contradict each other.
        """
        self.message, self.kind, self._check = message, kind, check
        self.paired = {*sent, *other, *within}
        """The fields of the message that this codec knows."""
        self._parts = {part.kind: part for part in parts}
        # Fields with values that are read, or written, as they are: what to read by what to set. Those to write stand
        # under the message within that has them.
        self._same_reads: dict[str, str] = {}
        self._same_writes: dict[str, dict[str, str]] = {outer: {} for outer in ("", *within)}
        # Other fields, by name: what makes them of a message; and what adds them to the arguments of a message.
        self._reads: dict[str, Callable[[_M], Any]] = {}
        self._writes: list[Callable[[_T, _Arguments], None]] = [_adding(path, make) for path, make in sent.items()]
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(cast("Any", kind)):
            hint = _Hint(hints[field.name])
            if field.name in made:
                self._reads[field.name] = hint.bounded(field.name, made[field.name])
            pair = _found(
                cast("Descriptor", message.DESCRIPTOR), names.get(field.name, field.name), within, (*sent, *other)
            )
            if pair is not None:
                self._pair(field, hint, *pair)
            elif hint.dataclass is not None and not {field.name} & {*made, *given}:
                self._spread(field.name, hint.dataclass)
            elif not {field.name} & {*made, *given}:
                raise TypeError(f"{message.DESCRIPTOR.name} has no field for {kind.__name__}.{field.name}")
        rest = set(message.DESCRIPTOR.fields_by_name) - self.paired
        if rest and is_whole:
            raise TypeError(f"{kind.__name__} has no field for {message.DESCRIPTOR.name}.{min(rest)}")
        self._get_same = _getter(self._same_reads.values())
        self._groups = [(outer, same, _getter(same.values())) for outer, same in self._same_writes.items() if same]

    def decode(self, message: _M, **given: Any) -> _T:
        """Returns the dataclass. Raises WireError."""
        values = dict(zip(self._same_reads, self._get_same(message), strict=True))
        for name, read in self._reads.items():
            values[name] = read(message)
        value = self.kind(**values, **given)
        if self._check is not None:
            self._check(value)
        return value

    def encode(self, value: _T) -> dict[str, Any]:
        """Returns the arguments of the message."""
        arguments: _Arguments = {}
        for outer, names, get in self._groups:
            (arguments.setdefault(outer, {}) if outer else arguments).update(zip(names, get(value), strict=True))
        for write in self._writes:
            write(value, arguments)
        return arguments

    def to_message(self, value: _T) -> _M:
        return self.message(**self.encode(value))

    def _pair(self, field: "Field[Any]", hint: "_Hint", path: str, of: FieldDescriptor) -> None:
        """Pairs a field of the dataclass with that of the message at this path."""
        self.paired.add(path.partition(".")[0])
        read, write = self._conversions(hint, of)
        if write is None:
            outer, _, name = path.rpartition(".")
            self._same_writes[outer][name] = field.name
        else:
            self._writes.append(_adding(path, _converted(attrgetter(field.name), write)))
        if field.name in self._reads:
            return
        default = None if field.default is MISSING else field.default
        is_set = _presence(path) if hint.is_optional and of.has_presence else None
        if of.enum_type is not None and not of.is_repeated and (hint.is_optional or default is not None):
            is_set = attrgetter(path)
        if read is is_set is None and not hint.bounds:
            self._same_reads[field.name] = path
        else:
            convert = hint.bounded(field.name, _converted(attrgetter(path), read))
            self._reads[field.name] = convert if is_set is None else _unless_unset(is_set, convert, default)

    def _spread(self, name: str, kind: type[Any]) -> None:
        """The dataclass has no message of its own: its fields are among those of this message."""
        part = self._parts.get(kind) or Codec(self.message, kind, is_whole=False)
        self.paired |= part.paired
        self._reads[name] = part.decode
        get = attrgetter(name)
        self._writes.append(lambda value, arguments: arguments.update(part.encode(get(value)) if get(value) else {}))

    def _conversions(self, hint: "_Hint", of: FieldDescriptor) -> tuple[_Function | None, _Function | None]:
        """Returns what reads and what writes the field's value; None where nothing is to be done."""
        if of.type == FieldDescriptor.TYPE_BYTES and hint.element is int:
            return lambda data: tuple(array(data, np.int32, of.name).tolist()), _packed_ints
        if of.type == FieldDescriptor.TYPE_BYTES and (dtype := hint.dtype) is not None:
            return lambda data: array(data, dtype, of.name), packed
        inner = _Hint(hint.element) if hint.element is not None else hint
        read = write = None
        if of.enum_type is not None:
            prefix = f"{_LOWER_TO_UPPER.sub('_', of.enum_type.name).upper()}_"
            numbers = {one: of.enum_type.values_by_name[prefix + one.name].number for one in inner.enum}
            read, write = _member(of.name, {number: one for one, number in numbers.items()}), numbers.__getitem__
        elif of.message_type is not None and (kind := inner.dataclass) is not None:
            part = self._parts.get(kind) or Codec(GetMessageClass(of.message_type), kind)
            read, write = part.decode, part.encode
        if not of.is_repeated:
            return read, write
        container: Callable[[Iterable[Any]], Any] = frozenset if hint.is_set else tuple
        return _each(read, container), _each(write, sorted if hint.is_set else list)


_Arguments = dict[str, Any]
_LOWER_TO_UPPER = re.compile("(?<=[a-z])(?=[A-Z])")


def unaliased(hint: Any) -> Any:
    """The type that an alias stands for (`type` of Python 3.12), as `NDArray` is one from numpy 2.5 on; else `hint`."""
    while (value := getattr(get_origin(hint) or hint, "__value__", None)) is not None:
        hint = value[arguments] if (arguments := get_args(hint)) else value
    return hint


class _Hint:
    """What the annotation of a field says."""

    def __init__(self, hint: Any) -> None:
        self.bounds: tuple[Bound, ...] = ()
        self.is_optional = False
        while True:
            hint = unaliased(hint)
            if get_origin(hint) is Annotated:
                hint, *bounds = get_args(hint)
                self.bounds += tuple(bounds)
            elif get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint):
                self.is_optional = True
                [hint] = [kind for kind in get_args(hint) if kind is not type(None)]
            else:
                break
        origin, arguments = get_origin(hint), get_args(hint)
        self.is_set = origin is frozenset
        self.element: Any = arguments[0] if origin in (tuple, frozenset) else None
        self.dtype: type[np.generic] | None = get_args(arguments[1])[0] if origin is np.ndarray else None
        self.dataclass: type[Any] | None = hint if is_dataclass(hint) and isinstance(hint, type) else None
        self.enum: tuple[Enum, ...] = tuple(hint) if isinstance(hint, type) and issubclass(hint, Enum) else ()

    def bounded(self, name: str, read: Callable[[_M], Any]) -> Callable[[_M], Any]:
        """Returns a function that also checks what it has read."""
        if not self.bounds:
            return read
        if len(self.bounds) == 1:
            checked = self.bounds[0].checked
            return lambda message: checked(name, read(message))
        return lambda message: reduce(lambda value, bound: bound.checked(name, value), self.bounds, read(message))


def _found(
    of: Descriptor, name: str, within: Iterable[str], without: Collection[str]
) -> tuple[str, FieldDescriptor] | None:
    """Returns the path of the field of this name in a message, or in those `within`; None without one."""
    if name in of.fields_by_name:
        return None if name in without else (name, of.fields_by_name[name])
    for outer in within:
        inside = of.fields_by_name[outer].message_type
        if inside is not None and name in inside.fields_by_name:
            return f"{outer}.{name}", inside.fields_by_name[name]
    return None


def _getter(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads all these attributes of a value at once."""
    paths = tuple(names)
    if len(paths) > 1:
        return attrgetter(*paths)
    get = attrgetter(*paths) if paths else None
    return lambda value: () if get is None else (get(value),)


def _add(arguments: _Arguments, path: str, value: Any) -> None:
    outer, _, inner = path.partition(".")
    if inner:
        arguments.setdefault(outer, {})[inner] = value
    else:
        arguments[outer] = value


def _adding(path: str, make: _Function) -> Callable[[Any, _Arguments], None]:
    return lambda value, arguments: _add(arguments, path, make(value))


def _converted(get: _Function, convert: _Function | None) -> _Function:
    if convert is None:
        return get
    return lambda value: None if (one := get(value)) is None else convert(one)


def _presence(path: str) -> _Function:
    outer, _, name = path.rpartition(".")
    return lambda message: (attrgetter(outer)(message) if outer else message).HasField(name)


def _unless_unset(is_set: _Function, read: _Function, default: Any) -> _Function:
    return lambda message: read(message) if is_set(message) else default


def _each(convert: _Function | None, container: Callable[[Iterable[Any]], Any]) -> _Function:
    return container if convert is None else lambda values: container(map(convert, values))


def _member(name: str, members: Mapping[int, Enum]) -> _Function:
    def read(number: int) -> Enum:
        if number not in members:
            raise WireError(f"{name} is {number}, which is unknown")
        return members[number]

    return read


def _packed_ints(values: Collection[int]) -> bytes:
    return packed(np.array(values, np.int32))


class OneOf(Generic[_M]):
    """A message that has one of several, each of which is paired with a dataclass, or with several that are sent."""

    def __init__(self, message: type[_M], **codecs: Codec[Any, Any] | tuple[Codec[Any, Any], ...]) -> None:
        self._message = message
        [self._oneof] = message.DESCRIPTOR.oneofs_by_name
        pairs = {name: several if isinstance(several, tuple) else (several,) for name, several in codecs.items()}
        self._of_name = {name: several[0] for name, several in pairs.items()}
        self._of_kind = {codec.kind: (name, codec) for name, several in pairs.items() for codec in several}
        self.kinds = self._of_kind.keys()
        """The dataclasses."""

    def decode(self, message: _M, **given: Any) -> Any:
        """Returns the dataclass that the message is. Raises WireError."""
        name = message.WhichOneof(self._oneof)
        if name not in self._of_name:
            raise WireError("the message is empty")
        return self._of_name[name].decode(getattr(message, name), **given)

    def encode(self, value: Any) -> _Arguments:
        name, codec = self._of_kind[type(value)]
        return {name: codec.encode(value)}

    def frame(self, value: Any) -> bytes:
        return self._message(**self.encode(value)).SerializeToString()
