"""Random JSON schemas: small ones, of every keyword that people use, refused ones among them.

Owns the generator. Its strings, lists and objects are bounded, so that an output of random tokens can end.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

# Numbers around which floats lose digits, and ordinary ones.
_LARGE = (2**53 - 1, 2**53 + 1, 10**15, 1234567890123456789, 2**62, 2**63 - 1, -(2**53) - 1, -(2**63), 2**64)
_SAID: tuple[Schema, ...] = (
    {"title": "T", "$comment": "c"}, {"example": "x", "examples": ["x"]}, {"x-order": 1}, {"deprecated": True},
    {"readOnly": True}, {"externalDocs": {"url": "u"}}, {"xml": {}}, {"contentMediaType": "text/html"},
    {"contentEncoding": "base64"}, {"uniqueItems": False}, {"id": "i"},
)  # fmt: skip
_NAMES = (
    r"^[\x01-\x03]$",
    "^[\x01]",
    r"^[\x01c]{1,2}$",
    "^[a-d]{4}$",
    "^[a-z]$",
    "^[ab]$",
    "^(x|y)$",
    "^s[0-9]$",
    "^[0-9]{2}$",
    "^n",
    "^id$",
    "^(id|name)$",
    "a+",
)
_WORDS = ("id", "name", "age", "tags", "city", "x", "y", "größe", "is ok", "last-seen", "日付")
_PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]+-[0-9]{2}$", "^(red|green|blue)$", r"^\d{3}\.\d{1,2}$", "^a.b$",
             r"^[\x01]$", "^[\x02-\x04]+$", r"^[\x01a]{1,3}$", "^[a&&b]$")  # fmt: skip
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
_VALUES: tuple[Any, ...] = ("on", "off", "a b", 'quo"te', "ü", 0, -7, 2.5, True, None, [], {}, [1, "two"], {"k": "v"})
# How deep lists and objects nest.
_MOST_DEPTH = 3


class SchemaMaker:
    """Makes one schema after another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._has_defs = False

    def make(self) -> Schema:
        """A schema, usually of an object or a list."""
        self._has_defs = self._random.random() < 0.12
        makers = (self._object, self._object, self._object, self._record, self._array, self._array, self._any)
        schema = self._random.choice(makers)(0)
        if self._has_defs:
            schema["$defs"] = {"leaf": self._scalar(), "node": self._node()}
        if self._random.random() < 0.1:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return schema

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _any(self, depth: int) -> Schema:
        if self._has_defs and self._chance(0.3):
            return {"$ref": f"#/$defs/{self._random.choice(('leaf', 'node'))}"}
        if depth >= _MOST_DEPTH or self._chance(0.55):
            return self._scalar()
        makers: tuple[Callable[[int], Schema], ...] = (self._object, self._array, self._combined, self._record)
        return self._random.choice(makers)(depth)

    def _node(self) -> Schema:
        """A tree, which refers to itself."""
        children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        return {"type": "object", "properties": {"v": self._scalar(), "next": children}, "additionalProperties": False}

    def _scalar(self) -> Schema:
        kinds = (self._string, self._string, self._integer, self._number, self._enum, self._simple)
        schema = self._random.choice(kinds)()
        if self._chance(0.1):
            schema["description"] = "what it is for"
        if self._chance(0.2):
            schema |= self._random.choice(_SAID)
        if self._chance(0.06):
            schema["nullable"] = True
        return schema

    def _simple(self) -> Schema:
        return self._random.choice(
            [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"const": "k"}]
        )

    def _string(self) -> Schema:
        choice = self._random.random()
        if choice < 0.15:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
        if choice < 0.3:
            return {"type": "string", "format": self._random.choice(_FORMATS)}
        if choice < 0.35:
            return {"type": "string", "maxLength": 5, "format": self._random.choice(("password", "int32", "jwt"))}
        low = self._random.randint(0, 3)
        schema: Schema = {"type": "string", "maxLength": low + self._random.randint(0, 9)}
        return schema | ({"minLength": low} if low else {})

    def _integer(self) -> Schema:
        low = self._random.randint(-50, 50)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 900)}
        if self._chance(0.2):
            schema["exclusiveMaximum"] = schema.pop("maximum") + 1
        if self._chance(0.1):
            large = self._random.choice(_LARGE) + self._random.randint(-1, 1)
            bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            schema = {"type": self._random.choice(("integer", "number")), self._random.choice(bounds): large}
            other = large + self._random.choice((-40, 40))
            schema |= {self._random.choice(("minimum", "maximum")): other} if self._chance(0.5) else {}
        if self._chance(0.1):
            schema = {"type": "integer", "multipleOf": self._random.choice((2, 5, 10)), "minimum": 0, "maximum": 1000}
        return schema

    def _number(self) -> Schema:
        low = self._random.randint(-9, 9)
        if self._chance(0.3):
            low += self._random.choice((0.25, 0.5, 0.125))
        lower, upper = (
            self._random.choice(("minimum", "exclusiveMinimum")),
            self._random.choice(("maximum", "exclusiveMaximum")),
        )
        return {"type": "number", lower: low, upper: low + self._random.choice((0.5, 1, 2.75, 50))}

    def _enum(self) -> Schema:
        if self._chance(0.08):
            return {"enum": [self._random.choice(_LARGE), "a"]}
        return {"enum": self._random.sample(_VALUES, self._random.randint(1, 4))}

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        schema: Schema = {"type": "array", "minItems": low, "maxItems": low + self._random.randint(0, 3)}
        if self._chance(0.15):
            schema["prefixItems"] = [self._any(depth + 1) for _ in range(self._random.randint(1, 2))]
        schema["items"] = self._any(depth + 1)
        if self._chance(0.04):
            schema["uniqueItems"] = True
        if self._chance(0.02):
            schema["contains"] = {"type": "integer"}
        return schema

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_WORDS, self._random.randint(1, 5))
        required = [name for name in names if self._chance(0.7)]
        schema: Schema = {"type": "object", "properties": {name: self._any(depth + 1) for name in names}}
        if required:
            schema["required"] = required
        schema["additionalProperties"] = False
        rare: tuple[tuple[float, Schema], ...] = (
            (0.03, {"additionalProperties": {"type": "boolean"}, "maxProperties": len(names) + 1}),
            (0.02, {"patternProperties": {"^z[0-9]$": {"type": "null"}}, "maxProperties": len(names) + 1}),
            (0.02, {"dependentRequired": {names[0]: [names[-1]]}}),
            (0.02, {"propertyNames": {"maxLength": 9}}),
            (0.04, {"propertyNames": {"type": "string"}, "additionalProperties": self._scalar(), "maxProperties": 9}),
            (0.03, {"propertyNames": {"enum": [*names, "z"]}, "additionalProperties": {"type": "null"}}),
            (0.03, {"patternProperties": {self._random.choice(_NAMES): self._scalar()}, "maxProperties": 9}),
            (0.02, {"if": {"required": [names[0]]}, "then": {"minProperties": 1}}),
            (0.02, {"unevaluatedProperties": False}),
        )
        for share, change in rare:
            if self._chance(share):
                schema |= change
        return schema

    def _record(self, _: int) -> Schema:
        """An object with names that the schema does not list, so that the same one might come twice."""
        num, pattern = self._random.randint(0, 3), self._random.choice(_NAMES)
        schema: Schema = {"type": "object", "minProperties": num, "maxProperties": num + self._random.randint(0, 2)}
        if self._chance(0.5):
            schema |= {"patternProperties": {pattern: self._scalar()}, "additionalProperties": False}
        elif self._chance(0.5):
            schema |= {"additionalProperties": self._scalar(), "propertyNames": {"pattern": "^[a-c]{1,2}$"}}
        else:
            schema["additionalProperties"] = self._scalar()
        if self._chance(0.3):
            schema["required"] = self._random.choice((["id"], ["s1"], ["a"], ["a", "b"], ["x", "y"]))
        return schema

    def _combined(self, depth: int) -> Schema:
        choice = self._random.random()
        if choice < 0.6:
            return {"anyOf": [self._any(depth + 1) for _ in range(self._random.randint(2, 3))]}
        if choice < 0.8:
            return {"oneOf": [self._integer(), {"type": "string", "maxLength": 5}, self._array(depth + 1)]}
        if choice < 0.95:
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": self._random.randint(3, 99)}]}
        return {"not": {"type": "string"}}


def with_null(schema: Any) -> Any:
    """The schema with what `nullable` means in OpenAPI, which JSON Schema does not know."""
    if isinstance(schema, list):
        return [with_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: one if key in ("enum", "const") else with_null(one) for key, one in schema.items()}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner
