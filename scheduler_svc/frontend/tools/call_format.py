"""Owns the description of how a family of models writes calls of tools and reasoning. Knows nothing of requests.

It is data: the parts `call` and `reasoning` of the files in `frontend/chat/response_templates`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self, cast

# The parts of a format that may be left out.
_EMPTY = {"calls_begin": "", "separator": "", "calls_end": "", "before_number": "", "quote": ""}

# Among the names of tagged arguments: there may be others too.
ANY_NAME = ""
# What a schema says of all arguments together, which a rule for each of them cannot.
_OF_ALL = frozenset(
    (
        *("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "not", "if", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas"),
    )
)


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
        found = sorted(schema.keys() & _OF_ALL) if self.tagged is not None else []
        return f"{found[0]} is not enforced where a model writes each argument by itself" if found else ""

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Raises ValueError for a key that is missing or unknown, and for a trigger that does not begin a call."""
        tagged = value.get("tagged")
        given = None if tagged is None else _texts(TaggedArguments, cast(Mapping[str, object], tagged))
        texts = _texts(cls, {**_EMPTY, **{name: text for name, text in value.items() if name != "tagged"}})
        call = cls(**texts, tagged=None if given is None else TaggedArguments(**given))
        if not call.trigger or not (call.calls_begin + call.call_begin).startswith(call.trigger):
            raise ValueError(f"trigger is {call.trigger!r}, which does not begin a call")
        return call


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning, and the white space that the model writes after them."""

    open: str
    close: str
    after: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Raises ValueError for a key that is missing or unknown."""
        return cls(**_texts(cls, {"after": "", **value}))

    def as_written(self, between: str) -> Self:
        """The same with the white space of a chat template, which writes `between` from reasoning to content."""
        _, mark, after = between.partition(self.close)
        return replace(self, after=after) if mark and not after.strip() else self

    def state(self, prefix: str) -> "ReasoningState":
        """What the prompt has of the reasoning. `prefix`: what the prompt has of the model's message."""
        opened, closed = prefix.rfind(self.open), prefix.rfind(self.close)
        if closed >= 0 and closed >= opened:
            return ReasoningState(may_begin=False, is_open=False)
        return ReasoningState(may_begin=opened < 0 and not prefix.strip(), is_open=opened >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningState:
    """Whether the model may begin to reason, or does so already."""

    may_begin: bool
    is_open: bool


def _texts(kind: type, value: Mapping[str, object]) -> dict[str, str]:
    names = {field.name for field in fields(kind)} - {"tagged"}
    if set(value) != names:
        raise ValueError(f"it has {', '.join(sorted(value))}; it must have {', '.join(sorted(names))}")
    for name, text in value.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} is {text!r}, not a string")
    return cast(dict[str, str], dict(value))
