"""Says whether no value matches two of the schemas of a oneOf. Owns no state.

llguidance decides it too, but not through references, which discriminated unions have.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, cast

from scheduler_svc.frontend.constraints.references import References

# How deep it looks for two properties that differ.
_MOST_DEPTH = 3
# Pairs that are looked at.
_MOST_SCHEMAS = 100


def are_apart(schemas: Sequence[Any], references: References) -> bool:
    """Whether each value matches one of the schemas at most, as far as it can be seen."""
    if len(schemas) > _MOST_SCHEMAS:
        return False
    return all(_are_two_apart(one, other, references, 0) for one, other in combinations(schemas, 2))


def _are_two_apart(one: Any, other: Any, references: References, depth: int) -> bool:
    one, other = _resolved(one, references), _resolved(other, references)
    if one is None or other is None or depth > _MOST_DEPTH:
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return all(_differ(value, another) for value in values for another in others)
    kinds, other_kinds = _kinds(one), _kinds(other)
    if not kinds & other_kinds:
        return True
    if kinds != {"object"} or other_kinds != {"object"}:
        return False
    listed, also_listed = one.get("properties", {}), other.get("properties", {})
    required = {*one.get("required", ()), *other.get("required", ())}
    common = [name for name in listed if name in also_listed and name in required]
    return any(_are_two_apart(listed[name], also_listed[name], references, depth + 1) for name in common)


def _resolved(schema: Any, references: References) -> Mapping[str, Any] | None:
    for _ in range(_MOST_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        found = references.target(str(cast("dict[str, Any]", schema)["$ref"]))
        schema = found[0] if found else None
    fields = cast("Mapping[str, Any]", schema) if isinstance(schema, dict) else None
    return None if fields is None or fields.get("nullable") else fields


def _values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _differ(one: object, other: object) -> bool:
    return one != other or isinstance(one, bool) != isinstance(other, bool)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type", ("null", "boolean", "number", "string", "array", "object"))
    kinds = {given} if isinstance(given, str) else set(given)
    return {"number" if kind == "integer" else kind for kind in kinds}
