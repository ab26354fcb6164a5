"""Owns the check of a chat's tools and of the choice between them. Knows nothing of templates or grammars.

A tool is a JSON object as in OpenAI's API: {"type": "function", "function": {"name", "description", "parameters",
"strict"}}. Every refusal is INVALID_ARGUMENT.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from tandem.v1 import chat_pb2 as pb

from scheduler_svc.frontend.rpc import status

# As in OpenAI's API. Names are parts of grammars and prompts, so they have no other characters.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FIELDS = frozenset({"name", "description", "parameters", "strict"})


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, object]
    # The arguments always match the schema, also if the model itself decides to call the tool.
    is_strict: bool
    # Why no arguments can be held to the schema, which is then that of any object; empty if they can.
    why_loose: str = ""


class Calls(Enum):
    """How many calls of tools an answer has."""

    NONE = "none"
    # The model decides.
    ANY = "any"
    AT_LEAST_ONE = "at least one"
    EXACTLY_ONE = "exactly one"
    AT_MOST_ONE = "at most one"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools an answer may call, and how often."""

    tools: tuple[Tool, ...]
    calls: Calls


def read_tools(tools: Sequence[object]) -> tuple[Tool, ...]:
    """The tools of a chat, from their JSON. Raises Refusal for the first one with an error."""
    found: dict[str, Tool] = {}
    for idx, tool in enumerate(tools):
        field = f"chat.tools_json[{idx}]"
        read = _read(field, tool)
        if read.name in found:
            raise status.invalid(field, f"{field} is the second tool with the name {read.name!r}; names must differ")
        found[read.name] = read
    return tuple(found.values())


def choose(chat: pb.Chat, tools: tuple[Tool, ...]) -> Choice:
    """What the caller's tool_choice and parallel_tool_calls allow. Raises Refusal."""
    choice, several = chat.tool_choice, not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
    kind = choice.WhichOneof("choice")
    if kind == "name":
        named = tuple(tool for tool in tools if tool.name == choice.name)
        if not named:
            known = ", ".join(tool.name for tool in tools[:8]) or "none"
            message = f"chat.tool_choice.name is {choice.name[:128]!r}, which is not a name of a tool; tools: {known}"
            raise status.invalid("chat.tool_choice.name", message)
        return Choice(named, Calls.EXACTLY_ONE)
    mode = choice.mode
    if mode not in pb.ToolChoiceMode.values():
        raise status.invalid("chat.tool_choice.mode", f"chat.tool_choice.mode is {mode}; the limit is 3")
    if mode == pb.TOOL_CHOICE_MODE_REQUIRED:
        if not tools:
            message = "chat.tool_choice.mode is required, and chat.tools_json is empty"
            raise status.invalid("chat.tool_choice.mode", message)
        return Choice(tools, Calls.AT_LEAST_ONE if several else Calls.EXACTLY_ONE)
    if mode == pb.TOOL_CHOICE_MODE_NONE or not tools:
        return Choice((), Calls.NONE)
    return Choice(tools, Calls.ANY if several else Calls.AT_MOST_ONE)


def _read(field: str, tool: object) -> Tool:
    body = _object(field, tool)
    if body.get("type", "function") != "function":
        raise status.invalid(f"{field}.type", f"{field}.type is {_shown(body['type'])}; only 'function' is served")
    function = _object(f"{field}.function", body.get("function"))
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{field}.function.name is {_shown(name)}; it must be 1 to 128 letters, digits, '_', '.' or '-'"
        raise status.invalid(f"{field}.function.name", message)
    for key in function.keys() - _FIELDS:
        raise status.invalid(
            f"{field}.function", f"{field}.function has {_shown(key)}, which this server does not know"
        )
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise status.invalid(
            f"{field}.function.strict", f"{field}.function.strict is {_shown(strict)}; it is a boolean"
        )
    parameters = function.get("parameters")
    # A tool without parameters takes an empty object.
    schema = _object(f"{field}.function.parameters", parameters if parameters is not None else {})
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in cast(list[object], kind)):
        why = f"its type is {_shown(cast(object, kind))}; arguments are a JSON object, so it must be 'object'"
        if strict:
            raise status.invalid(f"{field}.function.parameters", f"{field}.function.parameters: {why}")
        return Tool(name, {"type": "object"}, is_strict=False, why_loose=why)
    if schema:
        # Without it any other value would match too, and no call could be read from it.
        return Tool(name, {**schema, "type": "object"}, bool(strict))
    return Tool(name, {"type": "object", "properties": {}, "additionalProperties": False}, bool(strict))


def _object(field: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise status.invalid(field, f"{field} is {_shown(value)}; it must be a JSON object")
    return cast(Mapping[str, object], value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
