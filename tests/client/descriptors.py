"""The fields of protobuf messages by their paths."""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor


def paths(descriptor: Descriptor, path: str = "") -> Iterator[str]:
    """Paths of a message's fields; those of a message that is no entry of a map are its own fields, if it has any."""
    for field in descriptor.fields:
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry or not kind.fields:
            yield f"{path}{field.name}"
        else:
            yield from paths(kind, f"{path}{field.name}.")
