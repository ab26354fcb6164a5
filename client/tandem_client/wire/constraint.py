"""Builds constraints from keywords.

Owns the keywords of a constraint and the fields that they set. Checks the form only; the service reads the constraint.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack, cast

from tandem.v1 import constraint_pb2

from tandem_client.wire.assign import assign, json_text


class ConstraintOptions(TypedDict, total=False):
    """What an output may be; at most one of these. None means no constraint."""

    # A JSON schema as a dict, as True for any JSON, or as JSON text. Properties come in its order.
    json_schema: Mapping[str, Any] | bool | str | None
    # True: any JSON object.
    json_object: bool | None
    # A regular expression, which matches the whole output.
    regex: str | None
    # One of these strings.
    choices: Iterable[str] | None
    # A grammar in llguidance's dialect of Lark.
    lark: str | None


# Path of a field of GenerateRequest to the keyword that sets it, as errors need it.
CONSTRAINT_FIELDS: Mapping[str, str] = {
    **{f"constraint.{name}": name for name in ("json_schema", "json_object", "regex", "choices", "lark")},
    "constraint.choices.choices": "choices",
}


def constraint(**options: Unpack[ConstraintOptions]) -> constraint_pb2.Constraint | None:
    """Returns the constraint; None without one. Raises TypeError, ValueError, which name the keyword."""
    given = cast(dict[str, Any], {name: value for name, value in options.items() if value is not None})
    if given.get("json_object") is False:
        del given["json_object"]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; an output has one constraint")
    made = constraint_pb2.Constraint()
    ((name, value),) = given.items()
    match name:
        case "json_schema":
            # False would allow nothing.
            text = "true" if value is True else json_text("json_schema", value)
            assign("json_schema", made, "json_schema", text)
        case "json_object":
            if value is not True:
                raise TypeError(f"json_object is {value!r:.60}; it must be True or False")
            made.json_object.SetInParent()
        case "choices":
            if isinstance(value, str):
                raise TypeError(f"choices is {value!r:.60}; a list of strings is needed")
            made.choices.SetInParent()
            assign("choices", made.choices, "choices", value)
        case _:
            assign(name, made, name, value)
    return made
