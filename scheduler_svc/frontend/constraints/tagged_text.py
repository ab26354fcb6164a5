"""Holds the strings among tagged arguments to their schemas: a model writes them without quotes, as they are. Pure.

llguidance enforces a schema on JSON alone, so these become expressions of the grammar.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from scheduler_svc.frontend.chat.forms import is_text
from scheduler_svc.frontend.constraints.patterns import UnreadError, between_slashes, whole


def why_not(parameters: Mapping[str, object], *, is_strict: bool) -> str:
    """Why a string among the arguments cannot be held to its schema, in one sentence; empty if all can."""
    properties = parameters.get("properties")
    for name, schema in cast(Mapping[str, object], properties if isinstance(properties, dict) else {}).items():
        if is_text(schema) and (keyword := _not_held(cast(Mapping[str, Any], schema), is_strict)):
            words = "is not enforced where a model writes strings without quotes"
            return f"the {keyword} {str(cast(Any, schema)[keyword])[:64]!r} of argument {name[:64]!r} {words}"
    return ""


def _not_held(schema: Mapping[str, Any], is_strict: bool) -> str:
    # For those who do not ask for more, a format says nothing about which values are valid.
    if is_strict and "format" in schema:
        return "format"
    try:
        whole(str(schema.get("pattern", "")))
    except UnreadError:
        return "pattern"
    return ""


def held(schema: Mapping[str, Any]) -> Sequence[str]:
    """The expressions that a string under a schema matches, each between slashes. The schema has been checked."""
    found = list[str]()
    if "minLength" in schema or "maxLength" in schema:
        most = f"{int(schema['maxLength'])}" if "maxLength" in schema else ""
        found.append(f"/(.|\\n){{{int(schema.get('minLength', 0))},{most}}}/")
    if "pattern" in schema:
        found.append(f"/{between_slashes(whole(schema['pattern']))}/")
    return found
