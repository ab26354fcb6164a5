"""Reads the fields of a JSON object by type, and refuses by name what is wrong or unknown.

Owns the words of these errors. Knows no field by name. A field that is null counts as absent, as in OpenAI's clients.
"""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from typing import cast

from tandem_client.gateway.errors import UNKNOWN_FIELD, HttpError, invalid

MAX_UINT32 = 2**32 - 1
_SHOWN_CHARS = 60
_KINDS: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Fields:
    """One JSON object of a request."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        """`path` is the name of the object in its request, empty for the request itself."""
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def name(self, field: str) -> str:
        """The full name of a field, as errors have it."""
        return f"{self._path}.{field}" if self._path else field

    def any(self, field: str) -> object:
        """Returns a value of any type."""
        self._known.add(field)
        return self._values.get(field)

    def text(self, field: str) -> str | None:
        """Returns a string, which is Unicode text."""
        value = self.any(field)
        return None if value is None else text_of(value, self.name(field))

    def flag(self, field: str) -> bool | None:
        """Returns true or false."""
        value = self.any(field)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.name(field), value, "true or false")
        return value

    def integer(self, field: str, low: int = 0, high: int = MAX_UINT32) -> int | None:
        """Returns a whole number in a range."""
        value = self.any(field)
        return None if value is None else integer_of(value, self.name(field), low, high)

    def number(self, field: str) -> float | None:
        """Returns a finite number."""
        value = self.any(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(self.name(field), value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise wrong(self.name(field), value, "a finite number")
        return number

    def items(self, field: str) -> list[object] | None:
        """Returns a list."""
        value = self.any(field)
        if value is not None and not isinstance(value, list):
            raise wrong(self.name(field), value, "a list")
        return cast(list[object] | None, value)

    def inner(self, field: str) -> "Fields | None":
        """Returns an object, to be read further."""
        value = self.any(field)
        return None if value is None else object_of(value, self.name(field))

    def required(self, field: str) -> HttpError:
        """The error for a field that is missing."""
        return invalid(self.name(field), f"{self.name(field)} is missing")

    def drop(self, *fields: str) -> None:
        """Ignores fields, whatever they hold."""
        self._known.update(fields)

    def same_as_unset(self, values: Mapping[str, Collection[object]]) -> None:
        """Takes fields with these values, which ask for nothing; refuses other values by name."""
        for field, allowed in values.items():
            value = self.any(field)
            same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
            if value is not None and not any(same):
                needed = " or ".join("unset" if one == [] else json.dumps(one) for one in allowed if one != "")
                raise invalid(
                    self.name(field), f"{self.name(field)} is {shown(value)}; only {needed or 'null'} is supported"
                )

    def end(self) -> None:
        """Refuses the first field that nobody has read."""
        for field, value in self._values.items():
            if field not in self._known and value is not None:
                near = difflib.get_close_matches(field, self._known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                name = self.name(field)[:128]
                raise invalid(name, f"there is no field {name}{hint}", code=UNKNOWN_FIELD)


def object_of(value: object, name: str) -> Fields:
    """Returns an object, to be read further."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return Fields(cast(Mapping[str, object], value), name)


def text_of(value: object, name: str) -> str:
    """Returns a string, which is Unicode text."""
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    if not value.isascii():
        # JSON may have half a surrogate pair, which no text has.
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(value[error.start]):04X}"
            raise invalid(name, f"{name} has {code} at character {error.start}; it is not Unicode text") from None
    return value


def integer_of(value: object, name: str, low: int = 0, high: int = MAX_UINT32) -> int:
    """Returns a whole number in a range. JSON has one kind of numbers, so 16.0 is one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, value, "a whole number")
    if not low <= value <= high:
        raise invalid(name, f"{name} is {shown(value)}; it must be {low} to {high}")
    return value


def wrong(name: str, value: object, needed: str) -> HttpError:
    """The error for a value of another type."""
    kind = _KINDS.get(type(value), type(value).__name__)
    said = f"{name} is {shown(value)}" if isinstance(value, str | int | float) else f"{name} is {kind}"
    return invalid(name, f"{said}; it must be {needed}")


def shown(value: object) -> str:
    """A value as errors show it: JSON, and not longer than a line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
