"""Owns the grammar of a chat's answer: reasoning, then calls of tools, or what a constraint says. Pure.

The grammars are llguidance's dialect of Lark (its docs/syntax.md). Marks that are tokens of their own stand there as
references, `<[ID]>`; other marks are strings, which a lazy lexeme finds in free text. A call inside free text begins
where its trigger stands: from there on only a complete call matches.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.frontend.tools.call_format import CallFormat, ReasoningFormat, ReasoningState
from scheduler_svc.frontend.tools.call_rules import CallRules, WriteSchema
from scheduler_svc.frontend.tools.marks import TEXT, Marks
from scheduler_svc.frontend.tools.places import Values, places_of
from scheduler_svc.frontend.tools.tool import Calls, Choice, Tool

UNKNOWN_CALLS = "the service does not know how the served model writes calls of tools"
_HEAD = "%llguidance {}\n"
# Between reasoning and a call or free text. A constraint's text may begin with white space itself, so it stands after
# what the model usually writes there, and nothing else.
_SPACE = "/[ \\n]{0,4}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the served model writes answers."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    # What stands before content; most families write nothing there.
    content_begin: str = ""
    # The ids of the tokens that llguidance treats as marks, by their texts.
    marks: Mapping[str, int] = field(default_factory=dict[str, int])
    write_schema: WriteSchema


class UnknownFormatError(Exception):
    """An answer needs calls, and how the model writes them is unknown."""


def is_free(choice: Choice, content: str | None) -> bool:
    """Whether every text is an answer: no constraint, and no rule for calls."""
    is_bound = choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE, Calls.AT_MOST_ONE)
    return content is None and not is_bound and not any(tool.is_strict for tool in choice.tools)


def exact_tools(choice: Choice) -> tuple[Tool, ...]:
    """The tools with arguments that match their schemas, if these can be enforced."""
    is_forced = choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE)
    return tuple(tool for tool in choice.tools if tool.is_strict or is_forced)


def answer_grammar(
    choice: Choice, form: AnswerFormat, prefix: str, *, content: str | None, loose: Collection[str] = ()
) -> str | None:
    """The grammar of an answer, or None if every text is one.

    `prefix` is what the prompt has of the message. `content` is the grammar of a constraint: with it, an answer that
    calls no tool matches it, and has no text beside calls. Arguments of the tools in `loose` are any JSON object. If
    the format of calls is unknown, an answer has content alone where the model decides. Raises UnknownFormatError
    where it needs calls.
    """
    return _Answer(form, prefix, content).grammar(choice, loose)


class _Answer:
    """Writes one grammar."""

    def __init__(self, form: AnswerFormat, prefix: str, content: str | None) -> None:
        self._form, self._content, self._marks = form, content, Marks(form.marks)
        begins_content = bool(form.content_begin) and form.content_begin not in prefix
        self._content_begin = self._marks.rule(form.content_begin) if begins_content else ""
        self._lines = list[str]()
        nothing = ReasoningState(may_begin=False, is_open=False)
        self._state = nothing if form.reasoning is None else form.reasoning.state(prefix)
        self._reasoning = self._reasoning_of(form.reasoning, self._state)
        # None: the answer has no calls.
        self._calls: CallFormat | None = None
        self._values: Values = {}
        self._has_free_names = False

    def grammar(self, choice: Choice, loose: Collection[str]) -> str | None:
        if is_free(choice, self._content):
            return None
        calls = self._form.calls
        decides = choice.calls in (Calls.ANY, Calls.AT_MOST_ONE) and not any(tool.is_strict for tool in choice.tools)
        if choice.calls is Calls.NONE or (calls is None and decides):
            if self._content is None or not (self._reasoning or self._content_begin):
                return self._content
            return self._text(f"{self._content_begin} @answer")
        if calls is None:
            raise UnknownFormatError(UNKNOWN_CALLS)
        exact = {tool.name for tool in exact_tools(choice)} - set(loose)
        return self._text(self._with_calls(choice, calls, exact))

    def _with_calls(self, choice: Choice, calls: CallFormat, exact: Collection[str]) -> str:
        """Adds the rules of calls, and returns what the answer is after its reasoning."""
        marks, self._calls = self._marks, calls
        rules = CallRules(choice, calls, marks, self._form.write_schema, exact)
        is_forced = choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE)
        if self._content is not None and not is_forced and not marks.are_in(calls.trigger):
            # Both begin with ordinary text. A lexer takes the longest word, so both have the words of JSON.
            names, begin = rules.names(calls.call_begin), ""
        else:
            names, begin = rules.names(), marks.rule(calls.call_begin)
        self._values, self._has_free_names = rules.values, rules.has_free_names
        self._lines += [*rules.lines, f"call: {begin} {names}"]
        again = f"({marks.rule(calls.separator)} call)*" if choice.calls in (Calls.ANY, Calls.AT_LEAST_ONE) else ""
        only_calls = f"{marks.rule(calls.calls_begin)} call {again} {marks.rule(calls.calls_end)}"
        if is_forced:
            return only_calls
        if self._content is not None:
            return f"({only_calls} | {self._content_begin} @answer)"
        if self._form.content_begin:
            # A family that marks content writes no free text before calls.
            return f"({only_calls} | {self._content_begin} TEXT)"
        # The rule of the text before a call has consumed the trigger.
        rest = (calls.calls_begin + calls.call_begin)[len(calls.trigger) :]
        self._lines += [
            f"called: before_call {marks.rule(rest)} {names} {again} {marks.rule(calls.calls_end)}",
            marks.until("before_call", calls.trigger),
        ]
        return "(TEXT | called)" if choice.calls is Calls.AT_MOST_ONE else "called* TEXT"

    def _reasoning_of(self, reasoning: ReasoningFormat | None, state: ReasoningState) -> str:
        """Adds the rules of reasoning, and returns what the answer begins with."""
        if reasoning is None or not (state.is_open or state.may_begin):
            return ""
        self._lines.append(self._marks.until("reasoned", reasoning.close))
        space = _SPACE if self._content is None else self._marks.rule(reasoning.after)
        if state.is_open:
            return f"reasoned {space} "
        self._lines.append(f"reasoning: {self._marks.rule(reasoning.open)} reasoned")
        return f"(reasoning {space})? "

    def _text(self, answer: str) -> str:
        """The grammar: reasoning, then `answer`, in which @answer stands for the content."""
        lark = _HEAD + "\n".join([f"start: {self._reasoning}{answer}", *self._lines, TEXT])
        content = _parts(self._content) if "@answer" in answer and self._content is not None else []
        whole: dict[str, Any] = {"name": "whole", "lark_grammar": lark}
        # The worker reads only those of the first grammar.
        own_places = [part.pop("json_places", None) for part in content]
        has_free_content = any(own_places)
        if has_free_content or self._has_free_names:
            whole["json_places"] = places_of(
                *(self._marks, self._form.reasoning, self._state, self._calls),
                has_json_content=has_free_content or "json_schema" in (content or [{}])[0],
                values=self._values,
            )
        grammars = [whole]
        if content:
            grammars += [{**content[0], "name": "answer"}, *content[1:]]
        return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar. As llguidance does, a text that begins with a brace is read as JSON, another as Lark."""
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
