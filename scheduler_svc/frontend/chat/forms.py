"""Owns which form the answers of the served model have: a response template of Transformers, and how calls are written.

The files in `response_templates` and their README say what families there are. Knows nothing of requests.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from scheduler_svc.frontend.chat.calls import CALLS_FIELD

# Among the names of tagged arguments: there may be others too.
ANY_NAME = ""
# What a schema says of all arguments together, which a rule for each of them cannot.
_OF_ALL = frozenset(
    (
        *("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "not", "if", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas"),
    )
)
FOLDER = Path(__file__).parent / "response_templates"
# The names that response templates have for reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# In a response template of ours: a text or reasoning in several regions, joined by line breaks; the transform of calls.
_USUAL = "usual"
Part = TypeVar("Part", "TaggedArguments", "CallFormat", "ReasoningFormat")
_KEYS = {"family", "literals", "response_template", "call", "reasoning", "content_begin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Arguments as text between marks, one after the other, instead of a JSON object.

    A value of type string stands there as it is, any other one as JSON.
    """

    before_name: str
    after_name: str
    after_value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: calls_begin (call_begin NAME middle ARGUMENTS call_end, separator between) calls_end.

    With `before_number` it and a number follow the name.
    """

    call_begin: str
    middle: str
    call_end: str
    calls_begin: str = ""
    separator: str = ""
    calls_end: str = ""
    before_number: str = ""
    # Not empty: the arguments are an object with bare keys, and this mark stands around every string in it.
    quote: str = ""
    # The text that only a call contains, at the start of calls_begin + call_begin.
    trigger: str
    # None: the arguments are a JSON object.
    tagged: TaggedArguments | None = None

    def why_not(self, schema: Mapping[str, object]) -> str:
        """Why arguments in this form cannot be held to a schema, in one sentence; empty if they can."""
        if self.quote:
            return "the served model writes arguments in a form for which no schema is enforced"
        keywords = sorted(schema.keys() & _OF_ALL) if self.tagged is not None else []
        return f"{keywords[0]} is not enforced where a model writes each argument by itself" if keywords else ""

    @staticmethod
    def from_json(value: Mapping[str, object]) -> "CallFormat":
        """Raises ValueError for a key that is missing or unknown, and for a trigger that does not begin a call."""
        call = _made(CallFormat, {name: text for name, text in value.items() if name != "tagged"})
        if (tagged := value.get("tagged")) is not None:
            call = replace(call, tagged=_made(TaggedArguments, cast(Mapping[str, object], tagged)))
        if not call.trigger or not (call.calls_begin + call.call_begin).startswith(call.trigger):
            raise ValueError(f"trigger is {call.trigger!r}, which does not begin a call")
        return call


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning, and the white space that the model writes after them."""

    open: str
    close: str
    after: str = ""

    def as_written(self, between: str) -> Self:
        """The same with the white space of a chat template, which writes `between` from reasoning to content."""
        _, mark, after = between.partition(self.close)
        return replace(self, after=after) if mark and not after.strip() else self

    def state(self, prefix: str) -> "ReasoningState":
        """What the prompt has of the reasoning. `prefix`: what the prompt has of the model's message."""
        opened, closed = prefix.rfind(self.open), prefix.rfind(self.close)
        if opened > closed:
            return ReasoningState.OPEN
        return ReasoningState.OVER if closed >= 0 or prefix.strip() else ReasoningState.MAY_BEGIN


class ReasoningState(Enum):
    MAY_BEGIN = "may begin"
    OPEN = "open"
    # Also where there is none.
    OVER = "over"


def _made(kind: type[Part], value: Mapping[str, object]) -> Part:
    """A part of a form, of which all but `tagged` are texts. Raises ValueError for a key that is missing or unknown."""
    defaults = {field.name: field.default for field in fields(kind) if field.name != "tagged"}
    if not {name for name, default in defaults.items() if default is MISSING} <= value.keys() <= defaults.keys():
        raise ValueError(f"it has {', '.join(sorted(value))}; it must have {', '.join(sorted(defaults))}")
    for name, text in value.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} is {text!r}, not a string")
    return kind(**cast(dict[str, Any], value))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form of a model's answers. `family` names it in the log."""

    family: str
    # A response template of Transformers.
    template: Mapping[str, Any]
    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    # What stands before content; empty in most families.
    content_begin: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """What is parsed besides the content, as GetModelInfo lists it."""
        fields = self.template["fields"]
        reasoning = ("reasoning",) if any(name in fields for name in REASONING_FIELDS) else ()
        return (*reasoning, *(("tool_calls",) if CALLS_FIELD in fields else ()))


def read_form(value: object, name: str) -> AnswerForm:
    """The form in a file of ours, or of a bare response template of Transformers. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    given = cast(dict[str, Any], value)
    if "fields" in given:
        given = {"response_template": given}
    if unknown := sorted(given.keys() - _KEYS):
        raise ValueError(f"it has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    template = given.get("response_template")
    if not isinstance(template, dict) or not isinstance(cast(dict[str, Any], template).get("fields"), dict):
        raise ValueError("response_template must be an object with fields")
    call = given.get("call")
    reasoning = None if given.get("reasoning") is None else _made(ReasoningFormat, given["reasoning"])
    return AnswerForm(
        family=str(given.get("family", name)),
        template=_whole(cast(dict[str, Any], template), reasoning),
        calls=None if call is None else CallFormat.from_json(call),
        reasoning=reasoning,
        content_begin=str(given.get("content_begin", "")),
    )


def _whole(template: dict[str, Any], reasoning: ReasoningFormat | None) -> dict[str, Any]:
    """A response template with all that "usual" and marks by themselves stand for."""
    fields = dict[str, Any](template["fields"])
    for name, field in fields.items():
        if field == _USUAL:
            fields[name] = {"repeats": True, "join": "\n"}
            if reasoning is not None and name in REASONING_FIELDS:
                fields[name] |= {"open": reasoning.open, "close": reasoning.close}
        elif isinstance(field, str) and name not in ("content", CALLS_FIELD, *REASONING_FIELDS):
            fields[name] = {"open": field, "close_pattern": r"(?=[\s\S])", "repeats": True}
        elif isinstance(field, dict) and cast(dict[str, Any], field).get("transform") == _USUAL:
            fields[name] = {**field, "transform": {"type": "function", "function": _call_in(cast(Any, field))}}
    return {**template, "fields": fields}


def _call_in(field: Mapping[str, Any]) -> dict[str, str]:
    """Where a call has its name and arguments: the name in the first mark, in each element of a list, or inside."""
    if re.search(r"\(\?P?<name>", str(field.get("open_pattern"))):
        return {"name": "{name}", "arguments": "{content}"}
    within = "" if field.get("transform_each") else "content."
    return {"name": f"{{{within}name}}", "arguments": f"{{{within}arguments}}"}


@functools.cache
def _table() -> list[tuple[list[list[str]], AnswerForm]]:
    """The files in the order of their names, each with its literals."""
    values = [(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.json"))]
    return [(value["literals"], read_form(value, name)) for name, value in values]


def choose_form(templates: Sequence[str], of_checkpoint: str, override: AnswerForm | None) -> AnswerForm | None:
    """The form of a model with these chat templates; None if none is known.

    `of_checkpoint`: its response template as JSON, or empty. `override`: the operator's. Raises ValueError if the
    checkpoint's own one cannot be used.
    """
    if override is not None:
        return override
    text = "\n".join(templates)
    family = next((form for literals, form in _table() if any(_has_all(text, every) for every in literals)), None)
    if not of_checkpoint:
        return family
    template = read_form(json.loads(of_checkpoint), "checkpoint").template
    if family is None:
        return AnswerForm(family="checkpoint", template=template, calls=None, reasoning=None)
    return replace(family, family="checkpoint", template=template)


def _has_all(text: str, literals: Sequence[str]) -> bool:
    """Whether the text has every literal, and none that is written with a leading exclamation mark."""
    return all((literal[1:] not in text) if re.match(r"!.", literal) else (literal in text) for literal in literals)
