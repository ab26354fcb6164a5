"""Reads JSON objects by pydantic's models, and refuses by name what is wrong or unknown.

Owns the errors: each names the field as its caller wrote it, the value and what it must be.
Knows no field by name.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from tandem_client.gateway.errors import UNKNOWN_FIELD, HttpError, invalid
from tandem_contract.plural import numbered

_SHOWN_CHARS = 60
_NAME_CHARS = 128
# How tags of unions begin, which stand in the places of pydantic's errors, and what stands behind a key.
TAG, _KEY = "~", "[key]"
_KINDS: Mapping[type, str] = {list: "a list", dict: "an object"}
# What pydantic says of Python's types, in words of JSON.
_WORDS = {
    "bool_type": "it must be true or false",
    "dict_type": "it must be an object",
    "int_type": "it must be a whole number",
    "model_type": "it must be an object",
    "string_unicode": "it is not Unicode text",
}


@dataclass(frozen=True, slots=True)
class Only:
    """What a field may be that is not served: values that ask for nothing, and why no other can be ignored."""

    values: tuple[object, ...]
    why: str


class Body(BaseModel):
    """An object of a request. A field that is null counts as absent, as in OpenAI's clients."""

    model_config = ConfigDict(strict=True, extra="forbid")
    # Fields that are ignored, with the reason, and fields that are taken only with values which ask for nothing.
    IGNORED: ClassVar[Mapping[str, str]] = {}
    WITHOUT_EFFECT: ClassVar[Mapping[str, Only]] = {}
    KNOWN: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Notes the names that callers use."""
        cls.KNOWN = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the fields that are not attributes."""
        made = handler(schema)
        fields = handler.resolve_ref_schema(made)["properties"]
        fields |= {
            name: {"enum": [*only.values, None], "description": f"Not served: {only.why}."}
            for name, only in cls.WITHOUT_EFFECT.items()
        }
        fields |= {name: {"description": f"Ignored: {why}."} for name, why in cls.IGNORED.items()}
        return made

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: Any) -> Any:
        """The fields that are present. One that is not known is enough for a refusal; a body may have a million."""
        if not isinstance(given, dict):
            return given
        values, members, has_unknown = cast(dict[str, object], given), dict[str, object](), False
        if values.keys() <= cls.KNOWN and None not in values.values():
            # Nearly all messages of a long conversation.
            return values
        for name, value in values.items():
            if value is None or name in cls.IGNORED:
                continue
            if name in cls.KNOWN:
                members[name] = value
            elif name in cls.WITHOUT_EFFECT:
                _check_without_effect(name, value, cls.WITHOUT_EFFECT[name])
            elif not has_unknown:
                has_unknown, members[name.encode(errors="backslashreplace").decode()] = True, value
        return members


def _check_without_effect(name: str, value: object, only: Only) -> None:
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in only.values):
        needed = " or ".join("unset" if one == [] else json.dumps(one) for one in only.values if one != "") or "null"
        said = f"is {shown(value)}; only {needed} is supported: {only.why}"
        raise PydanticCustomError("without_effect", "{said}", {"field": name, "said": said})


_Body = TypeVar("_Body", bound=Body)


def read(model: type[_Body], values: Mapping[str, object]) -> _Body:
    """Returns the body of a request. Raises HttpError, which names the first wrong field."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, model) from None


def _refusal(error: ValidationError, model: type[Body]) -> HttpError:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    place = (*first["loc"], context["field"]) if "field" in context else first["loc"]
    name, kind = _name(place), first["type"]
    if kind == "without_effect":
        return invalid(name, f"{name} {context['said']}")
    if kind == "missing":
        return invalid(name, f"{name} is missing")
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(name, model.KNOWN, n=1) if len(place) == 1 else ()
        hint = f"; did you mean {near[0]}?" if near else ""
        return invalid(name, f"there is no field {name}{hint}", code=UNKNOWN_FIELD)
    said = first["msg"].replace("Input should be", "it must be").replace("a valid ", "a ").replace("'", "")
    return invalid(name, f"{name} is {shown(first['input'])}; {_WORDS.get(kind, said)}")


def _name(place: tuple[int | str, ...]) -> str:
    """The name of a field: `messages[2].content[0].text`."""
    name = ""
    for i, step in enumerate(place):
        if step == _KEY or str(step).startswith(TAG):
            continue
        is_entry = isinstance(step, int) or step.isdecimal() or place[i + 1 : i + 2] == (_KEY,)
        name += f"[{str(step)[:20]}]" if is_entry else f".{step}"
    return name.removeprefix(".")[:_NAME_CHARS]


def shown(value: object) -> str:
    """A value as errors show it: JSON, and not longer than a line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {numbered(value.bit_length(), 'bit')}"
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    text = f'"{value[: _SHOWN_CHARS + 1]}"' if isinstance(value, str) else json.dumps(value)
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def json_text(value: object) -> str:
    """JSON in ASCII, which keeps halves of surrogate pairs out of a message; a text as it is. Raises HttpError."""
    try:
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise HttpError(400, "the body is not valid: it is nested too deeply") from None
