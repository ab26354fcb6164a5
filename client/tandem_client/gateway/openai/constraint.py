"""What the output may be: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_…`, as a Constraint.

Owns their translation. The service compiles the constraint and refuses what it does not support.
"""

import json
from typing import cast

from tandem.v1 import inference_pb2

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.openai.fields import Fields, text_of, wrong

_RESPONSE = "response_format"
# The paths that errors about a constraint may have.
_PATHS = (
    "constraint", "constraint.json_schema", "constraint.json_object", "constraint.regex", "constraint.choices",
    "constraint.choices.choices", "constraint.lark",
)  # fmt: skip
_STRUCTURED = "structured_outputs"
# Fields of vLLM's before it had `structured_outputs`.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def set_constraint(fields: Fields, request: inference_pb2.GenerateRequest, names: dict[str, str]) -> None:
    """Sets the constraint, if one of the fields asks for one; refuses several. `names` learns which field it was."""
    found = list[str]()
    fields.drop("guided_decoding_backend")
    fields.same_as_unset({"guided_whitespace_pattern": ()})
    if (response := fields.inner(_RESPONSE)) is not None and _set_response(response, request):
        found.append(_RESPONSE)
    if (structured := fields.inner(_STRUCTURED)) is not None:
        found += [f"{_STRUCTURED}.{kind}" for kind in _set_structured(structured, request)]
    for field, kind in _GUIDED.items():
        value = fields.any(field)
        if value is not None:
            _set_kind(kind, value, field, request)
            found.append(field)
    if len(found) > 1:
        raise invalid(found[1], f"{' and '.join(found)} are set; a request has one constraint")
    for name in found:
        names |= dict.fromkeys(_PATHS, name)
    if found == [_RESPONSE]:
        names["constraint.json_schema"] = f"{_RESPONSE}.json_schema.schema"


def _set_response(response: Fields, request: inference_pb2.GenerateRequest) -> bool:
    """Returns whether the format is a constraint."""
    kind = response.text("type")
    if kind is None:
        raise response.required("type")
    if kind == "json_schema":
        inner = response.inner("json_schema")
        if inner is None:
            raise response.required("json_schema")
        # The output always obeys the schema, so `strict` makes no difference.
        inner.drop("name", "description", "strict")
        schema = inner.any("schema")
        if schema is None:
            raise inner.required("schema")
        inner.end()
        _set_kind("json", schema, inner.name("schema"), request)
    elif kind == "json_object":
        request.constraint.json_object.SetInParent()
    elif kind != "text":
        raise invalid(
            f"{_RESPONSE}.type", f'{_RESPONSE}.type is "{kind[:40]}"; it must be text, json_object or json_schema'
        )
    response.end()
    return kind != "text"


def _set_structured(structured: Fields, request: inference_pb2.GenerateRequest) -> list[str]:
    found = list[str]()
    structured.same_as_unset({"disable_any_whitespace": (False,), "whitespace_pattern": (), "structural_tag": ()})
    structured.same_as_unset({"disable_additional_properties": (False,), "disable_fallback": (False, True)})
    for kind in (*_GUIDED.values(), "json_object"):
        value = structured.any(kind)
        if value is None or (kind == "json_object" and value is False):
            continue
        _set_kind(kind, value, structured.name(kind), request)
        found.append(kind)
    structured.end()
    return found


def _set_kind(kind: str, value: object, name: str, request: inference_pb2.GenerateRequest) -> None:
    constraint = request.constraint
    if kind == "json":
        # vLLM takes a schema as text too.
        constraint.json_schema = text_of(value, name) if isinstance(value, str) else json_text(value)
    elif kind == "json_object":
        if value is not True:
            raise wrong(name, value, "true")
        constraint.json_object.SetInParent()
    elif kind == "regex":
        constraint.regex = text_of(value, name)
    elif kind == "grammar":
        constraint.lark = text_of(value, name)
    else:
        if not isinstance(value, list):
            raise wrong(name, value, "a list of strings")
        constraint.choices.SetInParent()
        choices = cast(list[object], value)
        constraint.choices.choices.extend(text_of(each, f"{name}[{i}]") for i, each in enumerate(choices))


def json_text(value: object) -> str:
    """JSON in ASCII, which keeps halves of surrogate pairs out of the message."""
    return json.dumps(value, separators=(",", ":"))
