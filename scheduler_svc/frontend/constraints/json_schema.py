"""Checks a JSON schema before it is compiled: its keywords and its sizes. Owns no state.

llguidance refuses keywords that it knows and does not support, and ignores those that it does not know. Here every
keyword must be on a list, so that no part of a schema is silently without effect.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

from scheduler_svc.frontend.constraints.limits import (
    MAX_DEPTH,
    MAX_ITEM_CHARS,
    MAX_REPETITION,
    GrammarError,
    UnsupportedError,
    too_large,
)
from scheduler_svc.frontend.constraints.repetition import repetition

_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LISTS_OF_SCHEMAS = ("prefixItems", "allOf", "anyOf", "oneOf")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties")
_OTHERS = (
    *("type", "enum", "const", "required", "pattern", "format", "$ref", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
# They say nothing about which values are valid.
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$comment", "$id", "$schema", "$anchor"),
)
ENFORCED = frozenset((*_BOUNDS, *_LISTS_OF_SCHEMAS, *_MAPS_OF_SCHEMAS, *_SCHEMAS, *_OTHERS))
_KNOWN = ENFORCED | frozenset(_ANNOTATIONS)
_DRAFTS = ("draft/2020-12/schema", "draft/2019-09/schema", "draft-07/schema", "draft-06/schema")

# Schemas inside each other, also by references: each takes some frames of Python's stack.
_MAX_REFERRED_DEPTH = 256
# Of an index in a reference; no list is longer.
_MAX_DIGITS = 9


def parsed(field: str, text: str) -> Mapping[str, Any] | bool:
    """Reads a schema. Raises GrammarError if it is no JSON object or boolean, or no text of llguidance can hold it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise GrammarError(f"{field} has the key {twice[:64]!r} twice in one object")
        return found

    def refused(constant: str) -> None:
        raise GrammarError(f"{field} contains {constant}, which is not JSON")

    def finite(number: str) -> float:
        if math.isinf(value := float(number)):
            raise GrammarError(f"{field} has the number {number[:32]}; the largest is {sys.float_info.max:g}")
        return value

    try:
        schema = json.loads(text, object_pairs_hook=unique, parse_constant=refused, parse_float=finite)
        # A string may hold half of a surrogate pair, which no grammar can.
        json.dumps(schema, ensure_ascii=False).encode()
    except RecursionError:
        raise GrammarError(f"{field} is nested too deep; the limit is {MAX_DEPTH}") from None
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise GrammarError(f"{field} has {code}, half of a surrogate pair; only whole pairs are text") from None
    except ValueError as error:
        raise GrammarError(f"{field} is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{field} is a JSON {type(schema).__name__}; it must be an object or true")
    return cast("Mapping[str, Any] | bool", schema)


def check_schema(field: str, schema: Mapping[str, Any] | bool) -> None:
    """Refuses unknown keywords and sizes beyond the limits. Raises GrammarError."""
    _check_depth(field, schema)
    _Check(field, schema).root()


def _check_depth(field: str, value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise GrammarError(f"{field} is nested deeper than the limit of {MAX_DEPTH}")


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


class _Check:
    """The check of one schema."""

    def __init__(self, field: str, schema: Mapping[str, Any] | bool) -> None:
        self._field, self._schema = field, schema
        # The measure of each object by its id, so that many references to one cost no more than one. 1 while it is
        # being measured, because a recursive schema is not unrolled.
        self._measured: dict[int, int] = {}
        self._depth = 0

    def root(self) -> None:
        self._measure(self._schema, "")

    def _measure(self, schema: object, place: str) -> int:
        """Returns the largest product of nested repetitions in a schema, after checking it."""
        if isinstance(schema, bool):
            return 1
        if not isinstance(schema, dict):
            raise self._wrong("a schema must be an object or a boolean", place)
        fields = cast("dict[str, Any]", schema)
        known = id(fields)
        if known not in self._measured:
            if self._depth == _MAX_REFERRED_DEPTH:
                raise self._wrong(f"references lead through more than {_MAX_REFERRED_DEPTH} schemas", place)
            self._measured[known] = 1
            self._depth += 1
            self._measured[known] = self._product(fields, place)
            self._depth -= 1
        return self._measured[known]

    def _product(self, fields: dict[str, Any], place: str) -> int:
        self._check_keywords(fields, place)
        inner = max((self._measure(one, at) for one, at in _subschemas(fields, place)), default=1)
        if isinstance(pattern := fields.get("pattern"), str):
            inner = max(inner, repetition(f"{self._field} (at {place}/pattern)", pattern))
        for pattern in _keys(fields, "patternProperties"):
            inner = max(inner, repetition(f"{self._field} (at {place}/patternProperties)", pattern))
        if isinstance(reference := fields.get("$ref"), str):
            inner = max(inner, self._referred(reference))
        product = inner * max((bound for name in _BOUNDS if (bound := self._bound(fields, name, place))), default=1)
        if product > MAX_REPETITION:
            raise too_large(self._field, "nested repetitions make", product, MAX_REPETITION, f" (at {place or '/'})")
        return product

    def _check_keywords(self, schema: dict[str, Any], place: str) -> None:
        for name in schema:
            if name not in _KNOWN:
                raise self._unsupported(name, place)
        if isinstance(schema.get("items"), list):
            raise self._unsupported("items with a list (use prefixItems)", place)
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(schema.get(name), bool):
                raise self._unsupported(f"{name} with a boolean", place)
        if "$schema" in schema and not str(schema["$schema"]).rstrip("#").endswith(_DRAFTS):
            raise self._unsupported(f"the dialect {str(schema['$schema'])[:100]!r}", place)
        items = [schema["const"]] if "const" in schema else []
        items += schema["enum"] if isinstance(schema.get("enum"), list) else []
        for item in items:
            if (count := len(json.dumps(item, ensure_ascii=False))) > MAX_ITEM_CHARS:
                raise too_large(
                    self._field,
                    "an item of enum or const has",
                    count,
                    MAX_ITEM_CHARS,
                    f" characters (at {place or '/'})",
                )

    def _bound(self, schema: dict[str, Any], name: str, place: str) -> int:
        bound = schema.get(name, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound < 0 or bound != int(bound):
            raise self._wrong(f"{name} must be an integer of at least 0", place)
        return int(bound)

    def _referred(self, reference: str) -> int:
        """Returns the measure of the target of a local reference; llguidance refuses others."""
        if not reference.startswith("#"):
            return 1
        target: Any = self._schema
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            idx = int(key) if key.isdecimal() and len(key) <= _MAX_DIGITS else sys.maxsize
            if isinstance(target, list) and idx < len(cast("list[Any]", target)):
                target = cast("list[Any]", target)[idx]
            elif isinstance(target, dict) and key in target:
                target = cast("dict[str, Any]", target)[key]
            else:
                raise GrammarError(f"{self._field}: the reference {reference[:100]!r} has no target")
        return self._measure(target, reference[1:])

    def _unsupported(self, what: str, place: str) -> GrammarError:
        return UnsupportedError(f"{self._field}: llguidance does not support {what[:100]} (at {place or '/'})")

    def _wrong(self, what: str, place: str) -> GrammarError:
        return GrammarError(f"{self._field}: {what} (at {place or '/'})")


def _keys(schema: dict[str, Any], name: str) -> list[str]:
    found = schema.get(name)
    return list(cast("dict[str, Any]", found)) if isinstance(found, dict) else []


def _subschemas(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yields the schemas right inside a schema, each with its place."""
    for name in _SCHEMAS:
        if name in schema:
            yield schema[name], f"{place}/{name}"
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(found := schema.get(name), list):
            yield from ((one, f"{place}/{name}/{i}") for i, one in enumerate(cast("list[Any]", found)))
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(found := schema.get(name), dict):
            yield from ((one, f"{place}/{name}/{key}") for key, one in cast("dict[str, Any]", found).items())
