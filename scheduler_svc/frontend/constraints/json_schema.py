"""Reads and checks a JSON schema before it is compiled: its keywords, its sizes and its references. Owns no state.

llguidance refuses keywords that it knows and does not support, and ignores those that it does not know. Here every
keyword must be on a list, so that no part of a schema is silently without effect.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from scheduler_svc.frontend.chat.conversation import inside, levels, read_json, type_of, within
from scheduler_svc.frontend.constraints import limits, numbers
from scheduler_svc.frontend.constraints.limits import CHOICES, GrammarError, too_large, unsupported, wrong
from scheduler_svc.frontend.constraints.patterns import repetition

BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LISTS_OF_SCHEMAS = ("prefixItems", "allOf", "anyOf", "oneOf")
MAPS_OF_SCHEMAS = ("properties", "patternProperties")
SCHEMAS = ("items", "additionalProperties")
_OTHERS = ("type", "enum", "const", "required", "pattern", "format", "$ref", "multipleOf", *numbers.BOUNDS)
ENFORCED = frozenset((*BOUNDS, *LISTS_OF_SCHEMAS, *MAPS_OF_SCHEMAS, *SCHEMAS, *_OTHERS))
_DEFINITIONS = ("$defs", "definitions")
# `lowering` writes them with others, or refuses them by their values.
WRITTEN = ("not", "propertyNames", "additionalItems", "uniqueItems", "nullable")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "propertyNames", "not")
# They say nothing about which values are valid. So do all that begin with x-.
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$comment", "$id", "id", "$schema", "$anchor", "$vocabulary", "externalDocs", "xml"),
    *("contentMediaType", "contentEncoding", "contentSchema"),
)
_KNOWN = ENFORCED.union(_DEFINITIONS, WRITTEN, _ANNOTATIONS)
_DRAFTS = ("draft/2020-12/schema", "draft/2019-09/schema", "draft-07/schema", "draft-06/schema", "draft-04/schema")
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))

# Schemas inside each other, also by references: each takes some frames of Python's stack.
_MAX_REFERRED_DEPTH = 256


class References:
    """The references into one schema. `field` is its place."""

    def __init__(self, field: str, root: object) -> None:
        self._field, self._root = field, root
        self._named: dict[str, tuple[object, str]] | None = None

    def target(self, reference: str, place: str) -> tuple[Any, str]:
        """The target of the reference at `place`, and its own place, as errors have it. Raises GrammarError."""
        base, _, pointer = reference.partition("#")
        is_named = base or (pointer and not pointer.startswith("/"))
        target = self._by_name(reference, base, pointer) if is_named else inside(self._root, self._field, pointer)
        if target is None:
            raise wrong(place, f"the reference {reference[:100]!r} has no target")
        return target

    def _by_name(self, reference: str, base: str, pointer: str) -> tuple[Any, str] | None:
        """By the text of an `$anchor` or an `$id`."""
        if self._named is None:
            self._named = dict(_names(self._root, self._field))
        target = self._named.get(reference)
        if target is None and pointer.startswith("/") and base in self._named:
            return inside(*self._named[base], pointer)
        return target or (self._named.get(base) if not pointer else None)


def _names(value: object, place: str) -> Iterator[tuple[str, tuple[object, str]]]:
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        for key, prefix in (("$id", ""), ("$anchor", "#")):
            if isinstance(name := fields.get(key), str):
                yield prefix + name.removesuffix("#"), (fields, place)
        for key, one in fields.items():
            yield from _names(one, within(place, key))
    elif isinstance(value, list):
        for idx, one in enumerate(cast("list[object]", value)):
            yield from _names(one, f"{place}[{idx}]")


def _is_number(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in cast("list[object]", value))


def _are_types(value: object) -> bool:
    listed = [value] if isinstance(value, str) else value
    return _are_texts(listed) and bool(listed) and _TYPES.issuperset(cast("list[str]", listed))


# What a keyword must be, and the test of it.
_FORMS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "type": (f"one of {', '.join(sorted(_TYPES))}, or a list of them", _are_types),
    "required": ("a list of strings", _are_texts),
    "enum": ("a list", lambda value: isinstance(value, list)),
    **dict.fromkeys(numbers.BOUNDS, ("a number", _is_number)),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("a number or a boolean", lambda value: isinstance(value, bool) or _is_number(value)),
    ),
    "multipleOf": ("a number", _is_number),
    **dict.fromkeys(("pattern", "format", "$ref"), ("a string", lambda value: isinstance(value, str))),
    **dict.fromkeys(LISTS_OF_SCHEMAS, ("a list of schemas", lambda value: isinstance(value, list))),
    **dict.fromkeys(
        (*MAPS_OF_SCHEMAS, *_DEFINITIONS), ("an object of schemas", lambda value: isinstance(value, dict))
    ),
}  # fmt: skip


def parsed(field: str, text: str) -> Mapping[str, Any] | bool:
    """Reads a schema. Raises GrammarError if it is not a JSON object or boolean, or llguidance cannot hold it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise GrammarError(f"{field} has the key {twice[:64]!r} twice in one object")
        return members

    def refused(constant: str) -> None:
        raise GrammarError(f"{field} contains {constant}, which is not JSON")

    def finite(number: str) -> float:
        if math.isinf(value := numbers.Written.read(number)):
            raise GrammarError(f"{field} has the number {number[:32]}; the largest is {sys.float_info.max:g}")
        return value

    hooks: dict[str, Any] = {"object_pairs_hook": unique, "parse_constant": refused, "parse_float": finite}
    schema = read_json(text, lambda what: GrammarError(f"{field} {what}"), **hooks)
    if not isinstance(schema, dict | bool):
        raise GrammarError(
            f"{field} is a JSON {type_of(schema).replace('integer', 'number')}; it must be an object or true"
        )
    return cast("Mapping[str, Any] | bool", schema)


def check(field: str, schema: Mapping[str, Any] | bool) -> None:
    """Refuses keywords that are not supported, and sizes beyond the limits. Raises GrammarError."""
    if sum(1 for _ in levels(schema)) > limits.MAX_DEPTH:
        raise GrammarError(f"{field} is nested deeper than the limit of {limits.MAX_DEPTH}")
    _measured(schema, field, References(field, schema), {}, 0)


def _measured(schema: object, place: str, references: References, known: dict[int, int], depth: int) -> int:
    """Returns the largest product of nested repetitions in a schema, after checking it.

    `known` has that of each object by its id, so that many references to one cost no more than one. It is 1 while it is
    being measured, because a recursive schema is not unrolled.
    """
    if isinstance(schema, bool):
        return 1
    if not isinstance(schema, dict):
        raise wrong(place, "a schema must be an object or a boolean")
    fields = cast("dict[str, Any]", schema)
    if id(fields) in known:
        return known[id(fields)]
    if depth == _MAX_REFERRED_DEPTH:
        raise wrong(place, f"references lead through more than {_MAX_REFERRED_DEPTH} schemas")
    known[id(fields)] = 1
    _check_keywords(fields, place)
    inner = max((_measured(one, at, references, known, depth + 1) for one, at in _subschemas(fields, place)), default=1)
    if "pattern" in fields:
        inner = max(inner, repetition(f"{place}.pattern", fields["pattern"]))
    for pattern in fields.get("patternProperties", ()):
        inner = max(inner, repetition(f"{place}.patternProperties", pattern))
    if "$ref" in fields:
        target = references.target(fields["$ref"], place)
        inner = max(inner, _measured(*target, references, known, depth + 1))
    product = inner * max(1, *(_bound(fields, name, place) for name in BOUNDS))
    if product > limits.MAX_REPETITION:
        raise too_large(place, "nested repetitions make", product, limits.MAX_REPETITION)
    known[id(fields)] = product
    return product


def _check_keywords(schema: dict[str, Any], place: str) -> None:
    for name in schema:
        if name not in _KNOWN and not name.startswith("x-"):
            raise unsupported(place, name[:100])
    for name, (form, is_valid) in _FORMS.items():
        if name in schema and not is_valid(schema[name]):
            raise wrong(place, f"{name} must be {form}")
    if "$schema" in schema and not str(schema["$schema"]).rstrip("#").endswith(_DRAFTS):
        raise unsupported(place, f"the dialect {str(schema['$schema'])[:100]!r}")
    items = [schema["const"]] if "const" in schema else []
    for item in [*items, *schema.get("enum", ())]:
        if (count := len(json.dumps(item, ensure_ascii=False))) > CHOICES.chars:
            what = "an item of enum or const has"
            raise too_large(place, what, count, CHOICES.chars, " characters")


def _bound(schema: dict[str, Any], name: str, place: str) -> int:
    bound = schema.get(name, 0)
    if not _is_number(bound) or bound < 0 or bound != int(bound):
        raise wrong(place, f"{name} must be an integer of at least 0")
    # Its text would be too long for a sentence.
    return min(int(bound), 10**9)


def _subschemas(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yields the schemas right inside a schema, each with its place."""
    for name in _SCHEMAS:
        # A list of items is of older drafts.
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            yield schema[name], f"{place}.{name}"
    for name in (*LISTS_OF_SCHEMAS, "items"):
        if isinstance(schemas := schema.get(name), list):
            yield from ((one, f"{place}.{name}[{i}]") for i, one in enumerate(cast("list[Any]", schemas)))
    for name in (*MAPS_OF_SCHEMAS, *_DEFINITIONS):
        yield from ((one, within(f"{place}.{name}", key)) for key, one in schema.get(name, {}).items())
