"""Owns the look-up of the limits of requests, which are options of the fields in the public protos (`limits.proto`).

Knows nothing of requests and refusals.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import limits_pb2


def limit_of(field: FieldDescriptor) -> limits_pb2.Limit:
    """Returns the limit of a field; an empty one if it has none."""
    return field.GetOptions().Extensions[limits_pb2.limit]


def limit_at(message: type[Message], path: str) -> limits_pb2.Limit:
    """Returns the limit of the field at a path, such as `stop.stop_strings`. Raises KeyError without such a field."""
    *above, name = path.split(".")
    kind: Any = message.DESCRIPTOR
    for part in above:
        kind = kind.fields_by_name[part].message_type
    return limit_of(kind.fields_by_name[name])
