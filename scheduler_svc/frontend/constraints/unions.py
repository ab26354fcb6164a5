"""Says whether no value matches two of the schemas of a oneOf. Owns no state.

llguidance decides it too, but not through references, which discriminated unions have.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, cast

from scheduler_svc.frontend.constraints import numbers
from scheduler_svc.frontend.constraints.references import References

# How deep it looks for two properties that differ.
_MOST_DEPTH = 3
# Each is compared with each other.
_MOST_SCHEMAS = 32
_ALL_KINDS = ("null", "boolean", "number", "string", "array", "object")


class Unions:
    """The unions of one schema."""

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
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            found = self._references.target(str(cast("dict[str, Any]", schema)["$ref"]))
            schema = found[0] if found else None
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
    given = schema.get("type", _ALL_KINDS)
    kinds = {given} if isinstance(given, str) else set(given)
    return {"number" if kind == "integer" else kind for kind in kinds}
