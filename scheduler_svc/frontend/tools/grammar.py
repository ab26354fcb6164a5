"""Owns the grammar of a chat's answer: reasoning, then calls of tools, or what a constraint says. Pure.

The grammars are llguidance's dialect of Lark (its docs/syntax.md). There, marks that are tokens of their own are not
text but references, `<[ID]>`, and free text never contains them; other marks are strings, which a lazy lexeme finds in
free text. A call inside free text begins where its trigger stands: from there on only a complete call matches.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from scheduler_svc.frontend.tools.call_format import CallFormat, ReasoningFormat, ReasoningState
from scheduler_svc.frontend.tools.tool import Calls, Choice, Tool

_HEAD = "%llguidance {}\n"
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
# Between reasoning and what follows; models write an empty line.
_SPACE = "/[ \\n]{0,4}/"
_TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the served model writes answers."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    # The ids of the tokens that llguidance treats as marks, by their texts.
    marks: Mapping[str, int] = field(default_factory=dict[str, int])
    # Options of llguidance for JSON schemas: {"x-guidance": ...}.
    json_options: Mapping[str, object] = field(default_factory=dict[str, object])


def call_grammar(
    choice: Choice,
    form: AnswerFormat,
    state: ReasoningState,
    *,
    is_supported: Callable[[Mapping[str, object]], bool],
) -> str | None:
    """The grammar of an answer with these calls, or None if every text is one.

    `is_supported`: whether llguidance has all of a JSON schema; the arguments of a tool that is not strict and has
    another schema are any JSON object. Raises ValueError if calls are needed and the model's format is unknown.
    """
    is_bound = choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE, Calls.AT_MOST_ONE)
    if choice.calls is Calls.NONE or not (is_bound or any(tool.is_strict for tool in choice.tools)):
        return None
    if form.calls is None:
        raise ValueError("the service does not know how the served model writes calls of tools")
    return _Writer(form, form.calls, state).answer(choice, is_supported)


def after_reasoning(grammar: str, form: AnswerFormat, state: ReasoningState) -> str:
    """The grammar of an answer whose content matches `grammar`, with the model's reasoning before it."""
    if form.reasoning is None or not (state.is_open or state.may_begin):
        return grammar
    marks = _Marks(form.marks)
    lines = [f"start: {_reasoning(state)} @answer", *_reasoning_rules(form.reasoning, marks), _TEXT]
    head: dict[str, object] = {"name": "reasoning", "lark_grammar": _HEAD + "\n".join(lines)}
    inner = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *rest = inner["grammars"]
    return json.dumps({**inner, "grammars": [head, {**first, "name": "answer"}, *rest]}, separators=(",", ":"))


class _Marks:
    """Texts as parts of a rule."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def parts(self, text: str) -> list[str]:
        """The references and strings that stand for `text`, in order."""
        parts, at = list[str](), 0
        for mark in self._pattern.finditer(text):
            parts += [_string(text[at : mark.start()]), f"<[{self._ids[mark.group()]}]>"]
            at = mark.end()
        return [part for part in [*parts, _string(text[at:])] if part]

    def rule(self, text: str) -> str:
        """`text` as a part of a rule; empty for the empty text."""
        return " ".join(self.parts(text))

    def until(self, name: str, text: str) -> str:
        """The line of a rule that matches everything up to and with the first `text`."""
        [*_, last] = self.parts(text)
        if self.parts(text) == [last] and last.startswith("<["):
            return f"{name}: TEXT {last}"
        return f"{name}[lazy]: TEXT {_string(text)}"


class _Writer:
    """Writes the rules of one grammar of calls."""

    def __init__(self, form: AnswerFormat, calls: CallFormat, state: ReasoningState) -> None:
        self._form, self._calls, self._state = form, calls, state
        self._marks = _Marks(form.marks)
        self._lines = list[str]()

    def answer(self, choice: Choice, is_supported: Callable[[Mapping[str, object]], bool]) -> str:
        calls, marks = self._calls, self._marks
        names = [self._tool(idx, tool, choice.calls, is_supported) for idx, tool in enumerate(choice.tools)]
        self._add(f"call: {marks.rule(calls.call_begin)} ({' | '.join(names)})")
        again = f"({marks.rule(calls.separator)} call)*" if choice.calls in (Calls.ANY, Calls.AT_LEAST_ONE) else ""
        prefix = _reasoning(self._state) if self._form.reasoning is not None else ""
        if choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE):
            start = f"{prefix} {marks.rule(calls.calls_begin)} call {again} {marks.rule(calls.calls_end)}"
        else:
            # In free text a call begins with its trigger, which the rule of the text before it has consumed.
            rest = (calls.calls_begin + calls.call_begin)[len(calls.trigger) :]
            begun = f"{marks.rule(rest)} ({' | '.join(names)}) {again} {marks.rule(calls.calls_end)}"
            self._add(f"called: before_call {begun}", marks.until("before_call", calls.trigger))
            start = f"{prefix} (TEXT | called)" if choice.calls is Calls.AT_MOST_ONE else f"{prefix} called* TEXT"
        if self._form.reasoning is not None and prefix:
            self._add(*_reasoning_rules(self._form.reasoning, marks))
        self._add(_TEXT)
        return _HEAD + "\n".join([f"start: {start}", *self._lines])

    def _add(self, *lines: str) -> None:
        self._lines.extend(lines)

    def _tool(self, idx: int, tool: Tool, calls: Calls, is_supported: Callable[[Mapping[str, object]], bool]) -> str:
        """Adds the rules of a call from the tool's name on, and returns the name of the first one."""
        is_schema_needed = tool.is_strict or calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE)
        is_exact = is_schema_needed and (tool.is_strict or is_supported(tool.parameters))
        schema = tool.parameters if is_exact else _ANY_OBJECT
        name, marks, form = f"tool_{idx}", self._marks, self._calls
        arguments = self._json(schema) if form.tagged is None else self._tagged(name, schema)
        self._add(f"{name}: {_string(tool.name)} {marks.rule(form.middle)} {arguments} {marks.rule(form.call_end)}")
        return name

    def _json(self, schema: Mapping[str, object]) -> str:
        return f"%json {json.dumps({**schema, **self._form.json_options}, separators=(',', ':'))}"

    def _tagged(self, name: str, schema: Mapping[str, object]) -> str:
        """The parts of a rule for arguments between marks, in the order of the schema."""
        tagged, marks = self._calls.tagged, self._marks
        assert tagged is not None
        properties, required = _of(dict, schema, "properties"), _of(list, schema, "required")
        if not properties:
            if schema is not _ANY_OBJECT:
                return ""
            self._add(f"{name}_name: /[A-Za-z0-9_.-]{{1,64}}/", marks.until(f"{name}_any", tagged.after_value))
            return f"({marks.rule(tagged.before_name)} {name}_name {marks.rule(tagged.after_name)} {name}_any)*"
        parts = list[str]()
        # References point into the schema of the whole tool.
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for idx, key in enumerate(properties):
            rule = f"{name}_arg_{idx}"
            begin = f"{marks.rule(tagged.before_name)} {_string(key)} {marks.rule(tagged.after_name)}"
            self._add(*self._value(rule, begin, {**_of(dict, properties, key), **shared}, tagged.after_value))
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _value(self, rule: str, begin: str, schema: Mapping[str, object], after: str) -> list[str]:
        choices = _of(list, schema, "enum")
        if choices and all(isinstance(each, str) for each in choices):
            options = " | ".join(_string(str(each)) for each in choices)
            return [f"{rule}: {begin} ({options}) {self._marks.rule(after)}"]
        if schema.get("type") == "string":
            return [f"{rule}: {begin} {rule}_text", self._marks.until(f"{rule}_text", after)]
        return [f"{rule}: {begin} {self._json(schema)} {self._marks.rule(after)}"]


def _reasoning(state: ReasoningState) -> str:
    if state.is_open:
        return f"reasoned {_SPACE}"
    return f"(reasoning {_SPACE})?" if state.may_begin else ""


def _reasoning_rules(of: ReasoningFormat, marks: _Marks) -> list[str]:
    return [f"reasoning: {marks.rule(of.open)} reasoned", marks.until("reasoned", of.close)]


def _of(kind: type[dict[str, Any]] | type[list[Any]], schema: Mapping[str, object], key: str) -> Any:
    """The value of a key if it has this type, else an empty one."""
    value = schema.get(key)
    return cast(Any, value if isinstance(value, kind) else kind())


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
