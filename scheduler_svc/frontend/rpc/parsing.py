"""Owns the step from a call's bytes to a message: checks the size, the syntax, and that every field is known.

Knows nothing of what a request means. Unknown fields are detected by size: a message shrinks when they are discarded.
`UnknownFieldSet` creates an object for each field, which takes seconds for a message of 4 MB, so it is used only to
name the first unknown field of a small message.
"""

from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from scheduler_svc.frontend.rpc import status

# The limit of control and health messages. In messages up to this size an unknown field is named.
MAX_SMALL_BYTES = 64 * 1024

Request = TypeVar("Request", bound=Message)


def check_size(kind: type[Message], data: bytes, max_bytes: int) -> None:
    """Refuses a message with too many bytes before it is parsed."""
    if len(data) > max_bytes:
        name = kind.DESCRIPTOR.name
        raise status.invalid(name, f"{name} has {len(data):,} bytes; the limit is {max_bytes:,}")


def parse(kind: type[Request], data: bytes) -> Request:
    """The message in `data`. Raises Refusal if the bytes are malformed or contain fields that this server lacks."""
    name = kind.DESCRIPTOR.name
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise status.invalid(name, f"the message of {len(data):,} bytes is not a valid {name}") from None
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    num_unknown = num_bytes - message.ByteSize()
    if not num_unknown:
        return message
    if len(data) > MAX_SMALL_BYTES:
        raise status.invalid(name, f"{name} has {num_unknown:,} bytes of fields that this server does not know")
    owner, number = _first_unknown(kind.FromString(data)) or (name, 0)
    raise status.invalid(f"{owner}.{number}", f"{owner} has field number {number}, which this server does not know")


def _first_unknown(message: Message) -> tuple[str, int] | None:
    """The message name and number of the first unknown field.

    A map entry that contains an unknown field counts as an unknown field of the message that owns the map.
    """
    for unknown in UnknownFieldSet(message):
        return message.DESCRIPTOR.name, unknown.field_number
    for field, value in cast(Any, message).ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            if (found := _first_unknown(part)) is not None:
                return found
    return None
