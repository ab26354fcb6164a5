"""The fields of protobuf messages by their paths."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message


def paths(descriptor: Descriptor, path: str = "") -> Iterator[str]:
    """Paths of a message's fields. A message in it stands for its own, unless it has none or is a map's entry."""
    for field in descriptor.fields:
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry or not kind.fields:
            yield f"{path}{field.name}"
        else:
            yield from paths(kind, f"{path}{field.name}.")


def values(message: Message, path: str = "") -> dict[str, Any]:
    """The values of a message's set fields by the same paths, lists and maps as those of Python."""
    found = dict[str, Any]()
    for field, value in message.ListFields():
        name, kind = f"{path}{field.name}", field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            found[name] = dict(value)
        elif field.is_repeated:
            found[name] = list(value)
        elif kind is not None and kind.fields:
            found |= values(value, f"{name}.")
        else:
            found[name] = value
    return found
