"""Owns the grammar of a chat's answer: reasoning, then calls of tools, or what a constraint says. Pure.

The grammars are llguidance's dialect of Lark (its docs/syntax.md). Marks that are tokens of their own stand there as
references, `<[ID]>`; other marks are strings, which a lazy lexeme finds in free text. A call inside free text begins
where its trigger stands: from there on only a complete call matches.

The grammar also says where JSON stands in the answer, in the words that the worker reads
(`gpu_worker/constraints/names.py`): in calls, and in content under a schema. Reasoning, free text and values that are
texts are not JSON, even with braces.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from scheduler_svc.frontend.chat.calls import is_text
from scheduler_svc.frontend.chat.conversation import Calls, Choice, Tool
from scheduler_svc.frontend.chat.forms import (
    ANY_NAME,
    CallFormat,
    ReasoningFormat,
    ReasoningState,
    TaggedArguments,
)
from scheduler_svc.frontend.constraints.patterns import UnreadError, between_slashes, whole
from scheduler_svc.frontend.sizes import wrong

# Free text. It has no tokens that llguidance treats as marks.
TEXT = "TEXT: /(.|\\n)*/"
_JSON_WORD = re.compile(r'"[^"]*"|[,:] ?|[{}\[\]]|[^{}\[\]",:]+|"')
# The text of a schema for llguidance, and whether an object under it may have names that it does not list.
WriteSchema = Callable[[Mapping[str, Any]], tuple[str, bool]]
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_BARE = (
    'bare: "{" (bare_pair ("," bare_pair)*)? "}"',
    'bare_pair: /[A-Za-z_][A-Za-z0-9_]{0,127}/ ":" bare_value',
    'bare_value: bare | "[" (bare_value ("," bare_value)*)? "]" | bare_text | bare_word',
    r"bare_word: /true|false|null|-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
)
# [mark, next state, JSON that the mark has]
Step = list[Any]
# By tool: the names of tagged arguments with JSON values, and of those with text values.
Values = Mapping[str, tuple[Collection[str], Collection[str]]]
UNKNOWN_CALLS = "the service does not know how the served model writes calls of tools"
_HEAD = "%llguidance {}\n"
# Between reasoning and a call or free text. A constraint's text may begin with white space itself, so it stands after
# what the model usually writes there, and nothing else.
_SPACE = "/[ \\n]{0,4}/"


class Marks:
    """The tokens that llguidance treats as marks: special ones, and those that look like <this>."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: their ids by their texts."""
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def rule(self, text: str) -> str:
        """`text` as a part of a rule: strings and references to tokens; empty for the empty text."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else string(part) for part in self.parts(text))

    def parts(self, text: str) -> list[str | int]:
        """The strings and the ids of tokens of which `text` is made."""
        parts, at = list[str | int](), 0
        for mark in self._pattern.finditer(text):
            parts += [text[at : mark.start()], self._ids[mark.group()]]
            at = mark.end()
        return [part for part in [*parts, text[at:]] if part != ""]

    def until(self, name: str, text: str, held: Sequence[str] = ()) -> str:
        """The lines of the rule `name`, which matches everything up to and with the first `text`.

        What stands before it matches each of the expressions `held`.
        """
        mark = self._pattern.search(text)
        if mark is None and not held:
            return f"{name}[lazy]: TEXT {string(text)}"
        if mark is None:
            word, end = name.upper(), _in_regex(text)
            whole = f"({' & '.join(held)}) {string(text)}"
            return f"{name}: {word}\n{word}: ({whole}) & ~/(.|\\n)*{end}(.|\\n)+/"
        # Free text cannot contain the mark, so it ends before the first one.
        before, rest = text[: mark.start()], f" {self.rule(mark.group())} {self.rule(text[mark.end() :])}".rstrip()
        if held:
            return f"{name}: {name.upper()}{rest}\n{name.upper()}: ({' & '.join(held)}) {string(before)}".rstrip()
        free = f"/(.|\\n)*{_in_regex(before)}/" if before else "TEXT"
        return f"{name}: {free}{rest}"


def string(text: str) -> str:
    """`text` as a string of a grammar; empty for the empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n").replace("\\ ", " ")


# Strings among tagged arguments: a model writes them without quotes, as they are. llguidance enforces a schema on JSON
# alone, so their schemas become expressions of the grammar.


def why_not_held(parameters: Mapping[str, object], *, is_strict: bool) -> str:
    """Why a string among the arguments cannot be held to its schema, in one sentence; empty if all can."""
    for name, schema in _of(dict, parameters, "properties").items():
        if is_text(schema) and (keyword := _not_held(schema, is_strict)):
            words = "is not enforced where a model writes strings without quotes"
            return f"the {keyword} {str(schema[keyword])[:64]!r} of argument {name[:64]!r} {words}"
    return ""


def _not_held(schema: Mapping[str, Any], is_strict: bool) -> str:
    # For callers that do not ask for more, a format says nothing about which values are valid.
    if is_strict and "format" in schema:
        return "format"
    try:
        whole(str(schema.get("pattern", "")))
    except UnreadError:
        return "pattern"
    return ""


def _held(schema: Mapping[str, Any]) -> Sequence[str]:
    """The expressions that a string under a schema matches, each between slashes. The schema has been checked."""
    terminals = list[str]()
    if "minLength" in schema or "maxLength" in schema:
        most = f"{int(schema['maxLength'])}" if "maxLength" in schema else ""
        terminals.append(f"/(.|\\n){{{int(schema.get('minLength', 0))},{most}}}/")
    if "pattern" in schema:
        terminals.append(f"/{between_slashes(whole(schema['pattern']))}/")
    return terminals


def _of(kind: type[dict[str, Any]] | type[list[Any]], schema: Mapping[str, object], key: str) -> Any:
    """The value of a key if it has this type, else an empty one."""
    value = schema.get(key)
    return cast(Any, value if isinstance(value, kind) else kind())


def braces(state: int) -> list[Step]:
    """JSON wherever a brace or a quote is opened; `state` follows."""
    return [[[begin], state, begin] for begin in '{["']


# The steps of an output that is JSON.
ONLY_JSON = [braces(0)]


def _groups(values: Values) -> list[tuple[list[str], list[str]]]:
    """Tools of which no argument is JSON in one and text in another, with their arguments that are JSON."""
    groups: list[tuple[list[str], set[str], set[str]]] = [([], set(), set())]
    for tool, (json_names, text_names) in values.items():
        for group in groups:
            if not (_meet(json_names, group[2]) or _meet(group[1], text_names)):
                break
        else:
            groups.append(group := ([], set(), set()))
        group[0].append(tool)
        group[1].update(json_names)
        group[2].update(text_names)
    return [(tools, sorted(json_names)) for tools, json_names, _ in groups]


def _meet(json_names: Collection[str], text_names: Collection[str]) -> bool:
    return bool(json_names) and (ANY_NAME in text_names or any(name in text_names for name in json_names))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    # What stands before content; most families write nothing there.
    content_begin: str = ""
    # The ids of the tokens that llguidance treats as marks, by their texts.
    marks: Mapping[str, int] = field(default_factory=dict[str, int])
    write_schema: WriteSchema


def is_free(choice: Choice, content: str | None) -> bool:
    """Whether every text is an answer: no constraint, and no rule for calls."""
    is_bound = choice.is_forced or choice.calls is Calls.AT_MOST_ONE
    return content is None and not is_bound and not any(tool.is_strict for tool in choice.tools)


def exact_tools(choice: Choice) -> tuple[Tool, ...]:
    """The tools with arguments that match their schemas, if these can be enforced."""
    return tuple(tool for tool in choice.tools if tool.is_strict or choice.is_forced)


def answer_grammar(
    choice: Choice, form: AnswerFormat, prefix: str, *, content: str | None, loose: Collection[str] = ()
) -> str | None:
    """The grammar of an answer, or None if every text is one.

    `prefix` is what the prompt has of the message. `content` is the grammar of a constraint: with it, an answer that
    calls no tool matches it, and has no text beside calls. Arguments of the tools in `loose` are any JSON object. If
    the format of calls is unknown, an answer has content alone where the model decides. Raises Refusal where it needs
    calls.
    """
    if is_free(choice, content):
        return None
    return _Answer(choice, form, prefix, content, {tool.name for tool in exact_tools(choice)} - set(loose)).grammar()


class _Answer:
    def __init__(
        self, choice: Choice, form: AnswerFormat, prefix: str, content: str | None, exact: Collection[str]
    ) -> None:
        """`exact`: tools with arguments that match schemas."""
        self._choice, self._form, self._content, self._exact = choice, form, content, exact
        self._marks, self._lines = Marks(form.marks), list[str]()
        begins_content = bool(form.content_begin) and form.content_begin not in prefix
        self._content_begin = self._marks.rule(form.content_begin) if begins_content else ""
        self._reasoning, self._state = form.reasoning, ReasoningState.OVER
        if form.reasoning is not None:
            self._state = form.reasoning.state(prefix)
        # None: the answer has no calls.
        self._calls: CallFormat | None = None
        # Whether an object in the arguments may have names that no schema lists.
        self._has_free_names = False
        # By tool: the names of tagged arguments with JSON values, and of those with text values.
        self._values = dict[str, tuple[set[str], set[str]]]()

    def grammar(self) -> str | None:
        choice, calls = self._choice, self._form.calls
        begin = self._begin()
        decides = choice.calls in (Calls.ANY, Calls.AT_MOST_ONE) and not any(tool.is_strict for tool in choice.tools)
        if choice.calls is Calls.NONE or (calls is None and decides):
            if self._content is None or not (begin or self._content_begin):
                return self._content
            return self._text(f"{begin}{self._content_begin} @answer")
        if calls is None:
            raise wrong("chat.tool_choice", f"or a strict tool needs a grammar, and {UNKNOWN_CALLS}")
        return self._text(begin + self._with_calls(calls))

    def _begin(self) -> str:
        """Adds the rules of reasoning, and returns what the answer begins with."""
        reasoning = self._form.reasoning
        if reasoning is None or self._state is ReasoningState.OVER:
            return ""
        self._lines.append(self._marks.until("reasoned", reasoning.close))
        space = _SPACE if self._content is None else self._marks.rule(reasoning.after)
        if self._state is ReasoningState.OPEN:
            return f"reasoned {space} "
        self._lines.append(f"reasoning: {self._marks.rule(reasoning.open)} reasoned")
        return f"(reasoning {space})? "

    def _with_calls(self, calls: CallFormat) -> str:
        """Adds the rules of calls, and returns what the answer is after its reasoning."""
        choice, marks, self._calls = self._choice, self._marks, calls
        if calls.quote:
            rest = marks.until("bare_rest", calls.quote)
            self._lines += [*_BARE, f"bare_text: {marks.rule(calls.quote)} bare_rest", rest]
        if self._content is not None and not choice.is_forced and marks.parts(calls.trigger) == [calls.trigger]:
            # Both begin with ordinary text. A lexer takes the longest word, so both have the words of JSON.
            names, begin = self._names(calls, calls.call_begin), ""
        else:
            names, begin = self._names(calls), marks.rule(calls.call_begin)
        self._lines.append(f"call: {begin} {names}")
        again = f"({marks.rule(calls.separator)} call)*" if choice.calls in (Calls.ANY, Calls.AT_LEAST_ONE) else ""
        only_calls = f"{marks.rule(calls.calls_begin)} call {again} {marks.rule(calls.calls_end)}"
        if choice.is_forced:
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

    def _names(self, calls: CallFormat, begin: str = "") -> str:
        """Adds the rules of all tools. Returns an alternative of a call of each tool, from its name to its end.

        With `begin`, which is JSON without marks, from there to its end.
        """
        return f"({' | '.join(self._tool(calls, idx, tool, begin) for idx, tool in enumerate(self._choice.tools))})"

    def _tool(self, calls: CallFormat, idx: int, tool: Tool, begin: str) -> str:
        schema = tool.parameters if tool.name in self._exact else _ANY_OBJECT
        name, marks = f"tool_{idx}", self._marks
        if begin:
            # One string for each word of JSON.
            head = " ".join(map(string, _JSON_WORD.findall(begin + tool.name + calls.middle)))
        else:
            number = f"{marks.rule(calls.before_number)} /[0-9]{{1,4}}/" if calls.before_number else ""
            head = f"{string(tool.name)} {number} {marks.rule(calls.middle)}"
        if calls.quote:
            arguments = "bare"
        elif calls.tagged is not None:
            arguments = self._tagged(calls.tagged, name, tool.name, schema)
        else:
            arguments = self._json(schema)
        self._lines.append(f"{name}: {head} {arguments} {marks.rule(calls.call_end)}".rstrip())
        return name

    def _json(self, schema: Mapping[str, object]) -> str:
        text, is_free = self._form.write_schema(schema)
        self._has_free_names |= is_free
        return f"%json {text}"

    def _tagged(self, tagged: TaggedArguments, name: str, tool: str, schema: Mapping[str, object]) -> str:
        """The parts of a rule for arguments between marks, in the order of the schema."""
        marks = self._marks
        properties, required = _of(dict, schema, "properties"), _of(list, schema, "required")
        if not properties:
            if schema.get("additionalProperties") is False:
                return ""
            self._values[tool] = (set(), {ANY_NAME})
            self._lines += [f"{name}_name: /[A-Za-z0-9_.-]{{1,64}}/", marks.until(f"{name}_any", tagged.after_value)]
            return f"({marks.rule(tagged.before_name)} {name}_name {marks.rule(tagged.after_name)} {name}_any)*"
        parts = list[str]()
        # References point into the schema of the whole tool.
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for idx, key in enumerate(properties):
            rule = f"{name}_arg_{idx}"
            begin = f"{marks.rule(tagged.before_name)} {string(key)} {marks.rule(tagged.after_name)}"
            is_json = self._value(rule, begin, {**_of(dict, properties, key), **shared}, tagged.after_value)
            self._values.setdefault(tool, (set(), set()))[not is_json].add(key)
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _value(self, rule: str, begin: str, schema: Mapping[str, object], after: str) -> bool:
        """Adds the rule of an argument. Returns whether its value is JSON."""
        choices = [schema["const"]] if "const" in schema else _of(list, schema, "enum")
        value, end = "", self._marks.rule(after)
        if not is_text(schema):
            value = self._json(schema)
        elif choices:
            value = f"({' | '.join(string(str(choice)) for choice in choices)})"
        if value:
            self._lines.append(f"{rule}: {begin} {value} {end}")
        else:
            self._lines += [f"{rule}: {begin} {rule}_text", self._marks.until(f"{rule}_text", after, _held(schema))]
        return not is_text(schema)

    def _text(self, answer: str) -> str:
        """The grammar of this answer, in which @answer stands for the content."""
        lark = _HEAD + "\n".join([f"start: {answer}", *self._lines, TEXT])
        content = _parts(self._content) if "@answer" in answer and self._content is not None else []
        grammars: list[dict[str, Any]] = [{"name": "whole", "lark_grammar": lark}]
        # The worker reads only those of the first grammar.
        own_places = [part.pop("json_places", None) for part in content]
        has_free_content = any(own_places)
        if has_free_content or self._has_free_names:
            grammars[0]["json_places"] = self._places(has_free_content or "json_schema" in (content or [{}])[0])
        if content:
            grammars += [{**content[0], "name": "answer"}, *content[1:]]
        return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))

    def _places(self, has_json_content: bool) -> list[list[Step]]:
        """The states of the answer."""
        marks, calls, reasoning = self._marks, self._calls, self._form.reasoning
        states = list[list[Step]]()
        may_begin = self._state is ReasoningState.MAY_BEGIN
        if reasoning is not None and self._state is not ReasoningState.OVER:
            if may_begin:
                states.append([[marks.parts(reasoning.open), 1, ""]])
            states.append([[marks.parts(reasoning.close), len(states) + 1, ""]])
        answer = len(states)
        states.append(braces(answer) if has_json_content else [])
        if calls is not None:
            # A list of calls is JSON as a whole. Calls by themselves may follow the first one without its trigger.
            begins = [calls.trigger, *([calls.call_begin] if calls.calls_begin and "{" not in calls.call_begin else [])]
            for begin in begins:
                _, brace, rest = begin.partition("{")
                states[answer].append([marks.parts(begin), answer if brace else answer + 1, brace + rest])
            if calls.tagged is None and not calls.quote:
                states.append(braces(answer))
            else:
                states.append([[marks.parts(calls.call_end), answer, ""]])
                if calls.tagged is not None:
                    self._add_tagged(calls, calls.tagged, states, answer)
        if may_begin:
            # It need not.
            states[0] += states[answer]
        return states

    def _add_tagged(self, calls: CallFormat, tagged: TaggedArguments, states: list[list[Step]], answer: int) -> None:
        """Adds the states of tagged arguments. Those of the first group follow in the state of a call, which is the
        last; there, too, the name of a tool of another group leads to its own."""
        marks, call = self._marks, states[-1]
        for idx, (tools, names) in enumerate(_groups(self._values)):
            if idx:
                begins = [marks.parts(f"{calls.call_begin}{tool}{calls.middle}") for tool in tools]
                call += [[begin, len(states), ""] for begin in begins]
                states.append([[marks.parts(calls.call_end), answer, ""]])
            region = len(states) - 1
            name, text, value = region + 1, region + 2, region + 3
            states[region].append([marks.parts(tagged.before_name), name, ""])
            begun = [marks.parts(f"{tagged.before_name}{key}{tagged.after_name}") for key in names]
            after = [marks.parts(tagged.after_value), region, ""]
            states += [
                [[marks.parts(tagged.after_name), text, ""], *([begin, value, ""] for begin in begun)],
                [after],
                [*braces(region), after],
            ]


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar. As llguidance does, a text that begins with a brace is read as JSON, another as Lark."""
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
