"""Brings a caller's value into one field of a message.

Owns the errors for values that do not fit, which name the keyword. Knows nothing of the single requests.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor

# The range of each kind of integer field.
_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# Options for which every service refuses 0.
_FROM_ONE = frozenset({"max_new_tokens", "num_samples"})


def assign(name: str, message: Any, field: str, value: Any) -> None:
    """Sets a field of a message to a value that a caller gave.

    Raises TypeError for a value of the wrong type and ValueError for a number that the field cannot hold or a text with
    half a surrogate pair, both beginning with `name`.
    """
    descriptor: FieldDescriptor = message.DESCRIPTOR.fields_by_name[field]
    try:
        if descriptor.message_type is not None:
            # The only messages here are the entries of maps.
            for key, entry in _entries(value):
                getattr(message, field)[key] = entry
        elif descriptor.is_repeated:
            getattr(message, field).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, field, value)
    except UnicodeEncodeError as error:
        # Python's strings may hold half a surrogate pair; it decodes bytes that are not UTF-8 into such strings.
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"{name} has {code} at character {error.start}; it is not Unicode text") from None
    except (TypeError, ValueError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        why = str(error)
        which = "each" if descriptor.is_repeated else "it"
        if descriptor.message_type is not None:
            which, descriptor = "each token id", descriptor.message_type.fields_by_name["key"]
        if isinstance(error, ValueError) and descriptor.cpp_type in _RANGES:
            low, high = _RANGES[descriptor.cpp_type]
            why = f"{which} must be {max(low, 1) if name in _FROM_ONE else low} to {high}"
        raise type(error)(f"{name} is {shown}; {why}") from None


def json_text(name: str, value: object) -> str:
    """Returns a mapping as JSON, or the text of a JSON object as it is. Raises TypeError, ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r:.60}; a mapping is needed")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be written as JSON: {error}") from None


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError("a mapping from token ids to numbers is needed")
    return cast(Mapping[Any, Any], value).items()
