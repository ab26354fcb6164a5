"""Finds what a `$ref` of a JSON schema means, and names places in a schema. Owns no state."""

import json
import re
import sys
from typing import Any, cast
from urllib.parse import unquote

# Of an index in a reference; no list is longer.
_MAX_DIGITS = 9


_PLAIN = re.compile(r"[\w$-]{1,64}")


def within(place: str, key: str) -> str:
    """The place of a key, as errors have it: `.properties.a`."""
    return f"{place}.{key}" if _PLAIN.fullmatch(key) else f"{place}[{json.dumps(key[:64])}]"


class References:
    """The references into one schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._named: dict[str, tuple[object, str]] | None = None

    def target(self, reference: str) -> tuple[Any, str] | None:
        """The target of a reference and its place in the schema, as errors have it. None if it has none."""
        base, _, pointer = reference.partition("#")
        if base or (pointer and not pointer.startswith("/")):
            return self._by_name(reference, base, pointer)
        return _inside(self._root, "", pointer)

    def _by_name(self, reference: str, base: str, pointer: str) -> tuple[Any, str] | None:
        """By the text of an `$anchor` or an `$id`."""
        if self._named is None:
            self._named = dict(_names(self._root, ""))
        known = self._named.get(reference)
        if known is None and pointer.startswith("/") and base in self._named:
            return _inside(*self._named[base], pointer)
        return known or (self._named.get(base) if not pointer else None)


def _inside(value: Any, place: str, pointer: str) -> tuple[Any, str] | None:
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        idx = int(key) if key.isdecimal() and len(key) <= _MAX_DIGITS else sys.maxsize
        if isinstance(value, list) and idx < len(cast("list[Any]", value)):
            value, place = cast("list[Any]", value)[idx], f"{place}[{idx}]"
        elif isinstance(value, dict) and key in value:
            value, place = cast("dict[str, Any]", value)[key], within(place, key)
        else:
            return None
    return value, place


def _names(value: object, place: str) -> list[tuple[str, tuple[object, str]]]:
    found: list[tuple[str, tuple[object, str]]] = []
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        for key, prefix in (("$id", ""), ("$anchor", "#")):
            if isinstance(name := fields.get(key), str):
                found.append((prefix + name.removesuffix("#"), (fields, place)))
        for key, one in fields.items():
            found += _names(one, within(place, key))
    elif isinstance(value, list):
        for idx, one in enumerate(cast("list[object]", value)):
            found += _names(one, f"{place}[{idx}]")
    return found
