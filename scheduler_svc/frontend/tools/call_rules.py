"""Owns the rules of single calls in a grammar: the name and the arguments, as the model's family writes them. Pure."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from scheduler_svc.frontend.tools.call_format import ANY_NAME, CallFormat
from scheduler_svc.frontend.tools.marks import Marks, json_words, string
from scheduler_svc.frontend.tools.tool import Choice, Tool

# The text of a schema for llguidance, and whether an object under it may have names that it does not list.
WriteSchema = Callable[[Mapping[str, Any]], tuple[str, bool]]
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_BARE = (
    'bare: "{" (bare_pair ("," bare_pair)*)? "}"',
    'bare_pair: /[A-Za-z_][A-Za-z0-9_]{0,127}/ ":" bare_value',
    'bare_value: bare | "[" (bare_value ("," bare_value)*)? "]" | bare_text | bare_word',
    r"bare_word: /true|false|null|-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
)


class CallRules:
    """The rules of all tools of a choice. `lines` has them after `names`."""

    def __init__(
        self, choice: Choice, form: CallFormat, marks: Marks, write: WriteSchema, exact: Collection[str]
    ) -> None:
        """`exact`: tools with arguments that match schemas."""
        self._choice, self._form, self._marks = choice, form, marks
        self._write, self._exact = write, exact
        self.lines = list[str]()
        # Whether an object in the arguments may have names that no schema lists.
        self.has_free_names = False
        # Of tagged arguments: the names whose values are JSON, and those whose values are text, by tool.
        self.values = dict[str, tuple[set[str], set[str]]]()
        if form.quote:
            self.lines += [
                *_BARE,
                f"bare_text: {marks.rule(form.quote)} bare_rest",
                marks.until("bare_rest", form.quote),
            ]

    def names(self, begin: str = "") -> str:
        """Makes the rules. Returns an alternative of a call of each tool, from its name to its end.

        With `begin`, which is JSON without marks, from there to its end.
        """
        return f"({' | '.join(self._tool(idx, tool, begin) for idx, tool in enumerate(self._choice.tools))})"

    def _tool(self, idx: int, tool: Tool, begin: str) -> str:
        schema = tool.parameters if tool.name in self._exact else _ANY_OBJECT
        name, marks, form = f"tool_{idx}", self._marks, self._form
        if begin:
            head = json_words(begin + tool.name + form.middle)
        else:
            number = f"{marks.rule(form.before_number)} /[0-9]{{1,4}}/" if form.before_number else ""
            head = f"{string(tool.name)} {number} {marks.rule(form.middle)}"
        self.lines.append(
            f"{name}: {head} {self._arguments(name, tool.name, schema)} {marks.rule(form.call_end)}".rstrip()
        )
        return name

    def _arguments(self, name: str, tool: str, schema: Mapping[str, object]) -> str:
        if self._form.quote:
            return "bare"
        return self._json(schema) if self._form.tagged is None else self._tagged(name, tool, schema)

    def _json(self, schema: Mapping[str, object]) -> str:
        text, is_free = self._write(schema)
        self.has_free_names |= is_free
        return f"%json {text}"

    def _tagged(self, name: str, tool: str, schema: Mapping[str, object]) -> str:
        """The parts of a rule for arguments between marks, in the order of the schema."""
        tagged, marks = self._form.tagged, self._marks
        assert tagged is not None
        properties, required = _of(dict, schema, "properties"), _of(list, schema, "required")
        if not properties:
            if schema.get("additionalProperties") is False:
                return ""
            self.values[tool] = (set(), {ANY_NAME})
            self.lines += [f"{name}_name: /[A-Za-z0-9_.-]{{1,64}}/", marks.until(f"{name}_any", tagged.after_value)]
            return f"({marks.rule(tagged.before_name)} {name}_name {marks.rule(tagged.after_name)} {name}_any)*"
        parts = list[str]()
        # References point into the schema of the whole tool.
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for idx, key in enumerate(properties):
            rule = f"{name}_arg_{idx}"
            begin = f"{marks.rule(tagged.before_name)} {string(key)} {marks.rule(tagged.after_name)}"
            lines, is_json = self._value(rule, begin, {**_of(dict, properties, key), **shared}, tagged.after_value)
            self.lines += lines
            self.values.setdefault(tool, (set(), set()))[not is_json].add(key)
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _value(self, rule: str, begin: str, schema: Mapping[str, object], after: str) -> tuple[list[str], bool]:
        """The lines of an argument, and whether its value is JSON."""
        choices = _of(list, schema, "enum")
        if choices and all(isinstance(each, str) for each in choices):
            options = " | ".join(string(str(each)) for each in choices)
            return [f"{rule}: {begin} ({options}) {self._marks.rule(after)}"], False
        if schema.get("type") == "string":
            return [f"{rule}: {begin} {rule}_text", self._marks.until(f"{rule}_text", after)], False
        return [f"{rule}: {begin} {self._json(schema)} {self._marks.rule(after)}"], True


def _of(kind: type[dict[str, Any]] | type[list[Any]], schema: Mapping[str, object], key: str) -> Any:
    """The value of a key if it has this type, else an empty one."""
    value = schema.get(key)
    return cast(Any, value if isinstance(value, kind) else kind())
