"""Writes a checked JSON schema with the keywords that llguidance keeps. Owns no state.

Annotations go; what llguidance has no keyword for is written with others, if the same values match. The rest is
refused by name. Every target of a reference stands in `$defs` afterwards, because places change. Whether the schemas of
a oneOf exclude each other is decided here, because llguidance does not see through references, which discriminated
unions have.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, cast

from scheduler_svc.frontend.chat.conversation import type_of, within
from scheduler_svc.frontend.constraints import numbers
from scheduler_svc.frontend.constraints.json_schema import (
    BOUNDS,
    ENFORCED,
    LISTS_OF_SCHEMAS,
    SCHEMAS,
    WRITTEN,
    References,
    check,
)
from scheduler_svc.frontend.constraints.limits import too_large, unsupported, wrong
from scheduler_svc.frontend.constraints.patterns import MOST_NAMES, UnreadError, names_of, parts, without_lookahead

# How deep it looks for two properties that differ.
_MOST_DEPTH = 3
# Each is compared with each other.
_MOST_SCHEMAS = 32
_ALL_KINDS = ("null", "boolean", "number", "string", "array", "object")
# The most properties and required names that patterns with more names are compared with.
_MOST_KNOWN = 256
_MOST_NAMES_OF_PATTERNS = 1_024
# minProperties is compared with the names of a pattern that has at most this many.
_MOST_COUNTED = 1_024
# Keywords with an effect on names.
_OF_NAMES = ENFORCED | {"not"}
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
# JSON Schema says what they mean; all others say nothing about which values are valid.
_UNKEPT_FORMATS = frozenset(
    ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer",
     "relative-json-pointer", "regex")
)  # fmt: skip
# Control characters without a short escape in JSON; other escapes are not written.
_CONTROL = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:x[01][0-9A-Fa-f]|x7[Ff]|u00[01][0-9A-Fa-f]|u007[Ff]|[va0]|c[A-Za-z])"
)
# A class with these may have no other characters, of which llguidance would find only in an output that none is left.
_MAY_BE_CONTROL = re.compile(_CONTROL.pattern + r"|\\[pP]|\[:|\[\^(?!\])")
_WRITABLE = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_HIDDEN = re.compile(r"\[|\\[^0-9A-Za-z]")
_UNKEPT_PARTS = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
_PART = r"(?:\d+(?:[.,]\d+)?S)"
_TIME = rf"T(?:\d+H(?:\d+M)?{_PART}?|\d+M{_PART}?|{_PART})"
# Patterns that pydantic and zod write, and the same without what looks around.
SAME_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    **{
        rf"^(?!\.)(?!.*\.\.)([{a}0-9_'+\-\.]*)[{a}0-9_+-]@([{a}0-9][{a}0-9\-]*\.)+[{a}]{{2,}}$": (
            rf"^(?:[{a}0-9_'+\-]+\.)*[{a}0-9_'+\-]*[{a}0-9_+\-]@(?:[{a}0-9][{a}0-9\-]*\.)+[{a}]{{2,}}$"
        )
        for a in ("A-Za-z", "a-zA-Z")
    },
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$"
    ),
}


class Unions:
    def __init__(self, references: References) -> None:
        self._references = references
        # The values of enum and const, by the id of the schema that has them.
        self._values: dict[int, frozenset[str] | None] = {}

    def are_apart(self, schemas: Sequence[Any]) -> bool:
        """Whether each value matches one of the schemas at most, as far as it can be seen."""
        if len(schemas) > _MOST_SCHEMAS:
            return False
        return all(self._are_two_apart(one, other, 0) for one, other in combinations(schemas, 2))

    def _are_two_apart(self, schema: Any, another: Any, depth: int) -> bool:
        one, other = self._resolved(schema), self._resolved(another)
        if one is None or other is None or depth > _MOST_DEPTH:
            return False
        values, others = self._values_of(one), self._values_of(other)
        if values is not None and others is not None:
            return values.isdisjoint(others)
        kinds, other_kinds = _kinds(one), _kinds(other)
        if not kinds & other_kinds:
            return True
        if kinds != {"object"} or other_kinds != {"object"}:
            return False
        listed, also_listed = one.get("properties", {}), other.get("properties", {})
        required = {*one.get("required", ()), *other.get("required", ())}
        common = [name for name in listed if name in also_listed and name in required]
        return any(self._are_two_apart(listed[name], also_listed[name], depth + 1) for name in common)

    def _resolved(self, schema: Any) -> Mapping[str, Any] | None:
        for _ in range(_MOST_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema or cast("dict[str, Any]", schema).get("nullable"):
                break
            schema, _ = self._references.target(cast("dict[str, Any]", schema)["$ref"], "")
        fields = cast("Mapping[str, Any]", schema) if isinstance(schema, dict) else None
        return None if fields is None or fields.get("nullable") else fields

    def _values_of(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        if id(schema) not in self._values:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            texts = (
                None if values is None else frozenset(json.dumps(numbers.plain(one), sort_keys=True) for one in values)
            )
            self._values[id(schema)] = texts
        return self._values[id(schema)]


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    given = schema.get("type", _ALL_KINDS if values is None else [type_of(value) for value in values])
    kinds = {given} if isinstance(given, str) else set(given)
    return {"number" if kind == "integer" else kind for kind in kinds}


def lower(field: str, schema: Mapping[str, Any] | bool) -> tuple[dict[str, Any] | bool, bool]:
    """Checks a schema, and writes it for llguidance. Refuses what that cannot keep, and sizes beyond the limits.

    Returns also whether an output may have an object with names that the schema does not list; llguidance takes one
    twice. Raises GrammarError; its text begins with `field` and the place in the schema: `field.properties.a`.
    """
    check(field, schema)
    return _Lowering(field, schema).run()


class _Lowering:
    def __init__(self, field: str, root: Mapping[str, Any] | bool) -> None:
        self._field, self._root, self._references = field, root, References(field, root)
        self._unions = Unions(self._references)
        self._names: dict[int, str] = {}
        # Targets that were not written yet: name, schema, place.
        self._waiting: list[tuple[str, Any, str]] = []
        self._definitions: dict[str, Any] = {}
        self._factors: set[int | float] = set()
        self._has_free_names = False
        # The number of names of patterns that became properties.
        self._num_names = 0

    def run(self) -> tuple[dict[str, Any] | bool, bool]:
        root = self._schema(self._root, self._field)
        while self._waiting:
            name, target, place = self._waiting.pop()
            self._definitions[name] = self._schema(target, place)
        numbers.check_factors(self._field, self._factors)
        if isinstance(root, dict) and self._definitions:
            root["$defs"] = self._definitions
        return root, self._has_free_names

    def _schema(self, schema: Any, place: str) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            self._has_free_names |= schema
            return schema
        fields: dict[str, Any] = schema
        if "not" in fields and self._refuses_all(fields["not"], place):
            return False
        *ahead, last = without_lookahead(fields["pattern"]) if "pattern" in fields else [None]
        if ahead:
            also = [{"pattern": one} for one in ahead]
            fields = {**fields, "pattern": last, "allOf": [*fields.get("allOf", ()), *also]}
        out: dict[str, Any] = {name: self._written(name, fields[name], place) for name in fields if name in ENFORCED}
        out = {name: value for name, value in out.items() if value is not None or name == "const"}
        if "oneOf" in out and self._unions.are_apart(fields["oneOf"]):
            # They exclude each other already.
            out.setdefault("allOf", []).append({"anyOf": out.pop("oneOf")})
        self._check_numbers(out, place)
        self._items(fields, out, place)
        if fields.get("uniqueItems") is True and int(fields.get("maxItems") or 2) > 1:
            raise unsupported(place, "uniqueItems")
        if "object" in _types(out):
            out = self._object(fields, out, place)
        if fields.get("nullable") is True:
            # As OpenAPI and OpenAI have it.
            return {"anyOf": [out, {"type": "null"}]}
        return out

    def _refuses_all(self, schema: object, place: str) -> bool:
        """Whether `not` leaves no value. Otherwise it must leave all."""
        if schema is False:
            return False
        if schema is True or not ENFORCED.union(WRITTEN).intersection(cast("dict[str, Any]", schema)):
            return True
        raise unsupported(place, "not")

    def _written(self, name: str, value: Any, place: str) -> Any:
        """The value of a keyword, or None if it constrains nothing."""
        here = f"{place}.{name}"
        if name == "$ref":
            return self._reference(value, place)
        if name in SCHEMAS and isinstance(value, dict | bool):
            return self._schema(value, here)
        if name in LISTS_OF_SCHEMAS:
            return [self._schema(one, f"{here}[{idx}]") for idx, one in enumerate(value)]
        if name == "properties":
            return {key: self._schema(one, within(here, key)) for key, one in value.items()}
        if name == "patternProperties":
            return {self._name_pattern(key, here): self._schema(one, within(here, key)) for key, one in value.items()}
        if name in BOUNDS:
            return int(value)
        if name in ("const", "enum"):
            numbers.check_values(here, value)
            return numbers.plain(value)
        if name == "pattern":
            return _writable(self._pattern(value, here))
        return self._format(value, place) if name == "format" else value

    def _reference(self, reference: str, place: str) -> str:
        target, where = self._references.target(reference, place)
        if id(target) not in self._names:
            self._names[id(target)] = str(len(self._names))
            self._waiting.append((self._names[id(target)], target, where))
        return f"#/$defs/{self._names[id(target)]}"

    def _pattern(self, pattern: str, here: str) -> str:
        same = SAME_PATTERNS.get(pattern, pattern)
        # Classes and escaped marks hide what looks like a group.
        outside = "".join(" " if _HIDDEN.match(part) else part for part in parts(same))
        if part := _UNKEPT_PARTS.search(outside):
            what = f"{part[0]} in a pattern; write the pattern without lookaround and references to groups"
            raise unsupported(here, what)
        if char := _CONTROL.search(outside):
            raise unsupported(here, f"the control character {char[0]!r} in a pattern; leave it out")
        return same

    def _name_pattern(self, pattern: str, here: str) -> str:
        """A pattern of names. llguidance finds only in an output that it has no name."""
        if (kept := next(filter(_may_be_control, parts(pattern)), None)) is not None:
            raise unsupported(here, f"the control characters {kept[:64]!r} in a pattern of names; leave them out")
        return self._pattern(pattern, here)

    def _format(self, name: Any, place: str) -> Any:
        if name in _UNKEPT_FORMATS:
            raise unsupported(place, f"the format {name!r}; leave it out, or write a pattern")
        return name if name in _FORMATS or not isinstance(name, str) else None

    def _check_numbers(self, out: dict[str, Any], place: str) -> None:
        bounds = numbers.bounds(place, out)
        if "multipleOf" in out:
            out["multipleOf"] = numbers.factor(place, out["multipleOf"])
            self._factors.add(out["multipleOf"])
        for name in numbers.BOUNDS:
            out.pop(name, None)
        out.update(bounds)

    def _items(self, fields: dict[str, Any], out: dict[str, Any], place: str) -> None:
        """A list of items, as older drafts have it."""
        if isinstance(items := fields.get("items"), list):
            here = f"{place}.items"
            listed = cast("list[Any]", items)
            out["prefixItems"] = [self._schema(one, f"{here}[{idx}]") for idx, one in enumerate(listed)]
            out["items"] = self._schema(fields.get("additionalItems", True), f"{place}.additionalItems")

    def _object(self, fields: dict[str, Any], out: dict[str, Any], place: str) -> dict[str, Any]:
        """The keywords of an object, by the names that it may have."""
        if "propertyNames" in fields:
            self._property_names(fields["propertyNames"], out, place)
        counted = [self._expand(pattern, out, place) for pattern in list(out.get("patternProperties", ()))]
        if not out.get("patternProperties", True):
            del out["patternProperties"]
        listed, required = out.get("properties", {}), set(out.get("required", ()))
        is_free = bool(out.get("patternProperties")) or out.get("additionalProperties", True) is not False
        optional = [name for name, one in listed.items() if name not in required and one is not False]
        if out.get("additionalProperties", True) is False and None not in counted and "patternProperties" in out:
            num_names = len(required.union(optional, *filter(None, counted)))
            if (least := out.get("minProperties", 0)) > num_names:
                what = f"minProperties is {least}, and the patterns and properties have {num_names} names"
                raise wrong(place, what)
        self._count(out, len(required), len(optional), place, is_free=is_free)
        if is_free and not (out.keys() & {"const", "enum"}) and (not out or not out.keys() <= _IN_PLACE):
            self._has_free_names = True
        return out

    def _count(self, out: dict[str, Any], required: int, optional: int, place: str, *, is_free: bool) -> None:
        """Takes bounds of the number of properties away that always hold, and refuses others beside optional ones."""
        least, most = out.get("minProperties", 0), out.get("maxProperties")
        if least <= required:
            out.pop("minProperties", None)
            least = 0
        if most is not None and not is_free and most >= required + optional:
            del out["maxProperties"]
            most = None
        if not optional or not (least or most is not None):
            return
        if is_free or least > required + 1 or (most is not None and most != required + 1):
            name = "minProperties" if least else "maxProperties"
            raise unsupported(place, f"{name} beside optional properties; list all properties in required")

    def _expand(self, pattern: str, out: dict[str, Any], place: str) -> list[str] | None:
        """Makes properties of a pattern with few names, which llguidance could find used up.

        Returns the names; None if they are many.
        """
        listed = dict.fromkeys((*out.get("properties", ()), *out.get("required", ())))
        try:
            names = names_of(pattern, _MOST_COUNTED)
        except UnreadError:
            if listed:
                what = f"the pattern {pattern[:64]!r} of names beside other names; write a simpler one"
                raise unsupported(place, what) from None
            return None
        most = max(MOST_NAMES, min(len(listed), _MOST_KNOWN))
        if names is None or len(names) > most or (len(names) > MOST_NAMES and not listed.keys() >= set(names)):
            return names
        self._num_names += len(names)
        if self._num_names > _MOST_NAMES_OF_PATTERNS:
            what = "the patterns of names match"
            raise too_large(place, what, self._num_names, _MOST_NAMES_OF_PATTERNS, " names")
        schema, properties = self._shared(out["patternProperties"].pop(pattern)), out.setdefault("properties", {})
        for name in names:
            properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        return names

    def _property_names(self, names: Any, out: dict[str, Any], place: str) -> None:
        """Writes propertyNames with other keywords."""
        here, seen = f"{place}.propertyNames", set[int]()
        while (rules := _rules(names)).keys() == {"$ref"} and id(names) not in seen:
            seen.add(id(names))
            names, _ = self._references.target(rules["$ref"], here)
        if isinstance(names, bool):
            if not names:
                out["maxProperties"] = 0
            return
        if "string" not in _types(names):
            raise unsupported(place, "propertyNames of another type than string")
        if "format" in rules and self._format(rules["format"], here) is None:
            del rules["format"]
        if (allowed := _values(rules)) is not None and not out.get("patternProperties"):
            self._only(out, [one for one in allowed if isinstance(one, str)])
        elif rules.keys() <= {"minLength", "maxLength"} and rules:
            most = str(int(rules["maxLength"])) if "maxLength" in rules else ""
            self._only_matching(f"^(?s:.{{{int(rules.get('minLength', 0))},{most}}})$", out, place)
        elif rules.keys() == {"pattern"}:
            self._only_matching(self._name_pattern(rules["pattern"], f"{here}.pattern"), out, place)
        elif rules:
            what = f"propertyNames with {' and '.join(rules)}"
            raise unsupported(place, f"{what}; write patternProperties with one pattern")

    def _only(self, out: dict[str, Any], names: list[str]) -> None:
        """Lets an object have these names only."""
        others = self._shared(out.get("additionalProperties", True))
        listed: dict[str, Any] = out.get("properties", {})
        properties = {name: one if name in names else False for name, one in listed.items()}
        if others is not False:
            properties |= {name: others for name in names if name not in properties}
        out["properties"], out["additionalProperties"] = properties, False

    def _shared(self, schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
        """A schema for several places: a reference, so that many inside each other make no large text."""
        if isinstance(schema, bool) or not schema:
            return schema
        name = f"_{len(self._definitions)}"
        self._definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def _only_matching(self, pattern: str, out: dict[str, Any], place: str) -> None:
        others = out.get("additionalProperties", True)
        if out.get("patternProperties") or out.get("properties") or out.get("required"):
            raise unsupported(place, "propertyNames beside other names; write patternProperties")
        if others is not False:
            out["patternProperties"] = {pattern: others}
        out["additionalProperties"] = False


def _writable(pattern: str) -> str:
    """The pattern without the characters of its classes that llguidance cannot write. It finds classes without any."""
    if not _MAY_BE_CONTROL.search(pattern):
        return pattern
    return "".join(
        f"[{part}&&{_WRITABLE}]" if part[0] == "[" and _MAY_BE_CONTROL.search(part) else part for part in parts(pattern)
    )


def _may_be_control(part: str) -> bool:
    """Whether part of a pattern is a class with characters that llguidance does not write, or may have only those."""
    if not part.startswith("["):
        return False
    if part.startswith("[^"):
        try:
            return names_of(f"^{part}$", 1) == []
        except UnreadError:
            return True
    return _CONTROL.search(part) is not None or ("&&" in part and re.search(r"\\[pP]|\[:", part) is not None)


def _rules(schema: Any) -> dict[str, Any]:
    """The keywords of a schema of names that have an effect."""
    fields = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    is_text = "string" in _types(fields)
    return {name: one for name, one in fields.items() if name in _OF_NAMES and not (name == "type" and is_text)}


def _values(rules: dict[str, Any]) -> list[Any] | None:
    """What the rules of names list; None if they say more, or nothing."""
    if rules.keys() == {"anyOf"}:
        listed = [_values(_rules(one)) for one in rules["anyOf"]]
        return None if None in listed else [value for values in listed for value in values or ()]
    if not rules or not rules.keys() <= {"enum", "const"}:
        return None
    return [one for one in rules.get("enum", [rules.get("const")]) if one == rules.get("const", one)]


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema names; all if it names none."""
    given = schema.get("type", ("object", "string"))
    return (given,) if isinstance(given, str) else tuple(given)
