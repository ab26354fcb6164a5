"""Owns the rules of single calls in a grammar: the name and the arguments, as the model's family writes them. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from scheduler_svc.frontend.tools.call_format import CallFormat
from scheduler_svc.frontend.tools.marks import Marks, string
from scheduler_svc.frontend.tools.tool import Calls, Choice, Tool

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}

IsSupported = Callable[[Mapping[str, object]], bool]


class CallRules:
    """The rules of all tools of a choice. `lines` has them after `names`."""

    def __init__(
        self, choice: Choice, form: CallFormat, marks: Marks, json_options: Mapping[str, object], supports: IsSupported
    ) -> None:
        """`json_options`: keys for the root of each JSON schema."""
        self._choice, self._form, self._marks = choice, form, marks
        self._json_options, self._supports = json_options, supports
        self.lines = list[str]()

    def names(self) -> str:
        """Makes the rules. Returns an alternative of a call of each tool, from its name to its end."""
        return f"({' | '.join(self._tool(idx, tool) for idx, tool in enumerate(self._choice.tools))})"

    def _tool(self, idx: int, tool: Tool) -> str:
        is_forced = self._choice.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE)
        is_exact = tool.is_strict or (is_forced and self._supports(tool.parameters))
        schema = tool.parameters if is_exact else _ANY_OBJECT
        name, marks, form = f"tool_{idx}", self._marks, self._form
        arguments = self._json(schema) if form.tagged is None else self._tagged(name, schema)
        end = marks.rule(form.call_end)
        self.lines.append(f"{name}: {string(tool.name)} {marks.rule(form.middle)} {arguments} {end}".rstrip())
        return name

    def _json(self, schema: Mapping[str, object]) -> str:
        return f"%json {json.dumps({**schema, **self._json_options}, separators=(',', ':'))}"

    def _tagged(self, name: str, schema: Mapping[str, object]) -> str:
        """The parts of a rule for arguments between marks, in the order of the schema."""
        tagged, marks = self._form.tagged, self._marks
        assert tagged is not None
        properties, required = _of(dict, schema, "properties"), _of(list, schema, "required")
        if not properties:
            if schema is not _ANY_OBJECT:
                return ""
            self.lines += [f"{name}_name: /[A-Za-z0-9_.-]{{1,64}}/", marks.until(f"{name}_any", tagged.after_value)]
            return f"({marks.rule(tagged.before_name)} {name}_name {marks.rule(tagged.after_name)} {name}_any)*"
        parts = list[str]()
        # References point into the schema of the whole tool.
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for idx, key in enumerate(properties):
            rule = f"{name}_arg_{idx}"
            begin = f"{marks.rule(tagged.before_name)} {string(key)} {marks.rule(tagged.after_name)}"
            self.lines += self._value(rule, begin, {**_of(dict, properties, key), **shared}, tagged.after_value)
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _value(self, rule: str, begin: str, schema: Mapping[str, object], after: str) -> list[str]:
        choices = _of(list, schema, "enum")
        if choices and all(isinstance(each, str) for each in choices):
            options = " | ".join(string(str(each)) for each in choices)
            return [f"{rule}: {begin} ({options}) {self._marks.rule(after)}"]
        if schema.get("type") == "string":
            return [f"{rule}: {begin} {rule}_text", self._marks.until(f"{rule}_text", after)]
        return [f"{rule}: {begin} {self._json(schema)} {self._marks.rule(after)}"]


def _of(kind: type[dict[str, Any]] | type[list[Any]], schema: Mapping[str, object], key: str) -> Any:
    """The value of a key if it has this type, else an empty one."""
    value = schema.get(key)
    return cast(Any, value if isinstance(value, kind) else kind())
