"""Owns the check of a chat, of its tools and of the choice between them, and its messages as frozen values. Pure.

Knows nothing of templates, grammars or tokens; `shape` writes the messages as a template takes them. A tool is a JSON
object as in OpenAI's API: {"type": "function", "function": {"name", "description", "parameters", "strict"}}. What a
caller sends as JSON inside a field is an object, bounded in depth, and UTF-8 throughout. Every refusal is
INVALID_ARGUMENT and names the field, the number and the limit.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NoReturn, cast
from urllib.parse import unquote

from tandem.v1 import chat_pb2 as pb

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import Check, check_count, refuse, wrong
from tandem_contract.plural import numbered

# As in OpenAI's API. Names are parts of grammars and prompts, so they have no other characters.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# `return` is what Transformers makes of the return value of a function.
_FIELDS = frozenset({"name", "description", "parameters", "strict", "return"})
MAX_DEPTH = 64
_TYPES: list[tuple[type, str]] = [
    (str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (type(None), "null")
]  # fmt: skip
# The most digits of an index in a pointer; no list is longer.
_MAX_DIGITS = 9
_PLAIN = re.compile(r"[\w$-]{1,64}")
# Names of arguments of a template.
MAX_TEMPLATE_ARGS = 64
_check_counts = Check(pb.Chat, "chat.")
# Templates build tokens of them ('<|' + role + '|>'), so no other role is accepted.
ROLES = ("system", "developer", "user", "assistant", "tool")
# What Transformers' call takes itself, what it gives the template, and what a template takes from its environment.
RESERVED = frozenset(
    (
        *("self", "conversation", "conversations", "chat_template", "sanitize_control_tokens", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "add_generation_prompt", "continue_final_message"),
        *("messages", "tools", "documents", "special_tokens"),
        *("raise_exception", "strftime_now", "dict", "namespace", "range", "lipsum", "cycler", "joiner", "loop"),
        *("caller", "varargs", "kwargs", "super"),
    )
)


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
    NONE = "none"
    # The model decides.
    ANY = "any"
    AT_LEAST_ONE = "at least one"
    EXACTLY_ONE = "exactly one"
    AT_MOST_ONE = "at most one"


@dataclass(frozen=True, slots=True)
class Choice:
    tools: tuple[Tool, ...]
    calls: Calls

    @property
    def is_forced(self) -> bool:
        return self.calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE)


def read_tools(tools: Sequence[object]) -> tuple[Tool, ...]:
    """The tools of a chat, from their JSON. Raises Refusal for the first one with an error."""
    by_name: dict[str, Tool] = {}
    for idx, tool in enumerate(tools):
        field = f"chat.tools_json[{idx}]"
        read = _tool(field, tool)
        if read.name in by_name:
            raise wrong(field, f"is the second tool with the name {read.name!r}; names must differ")
        by_name[read.name] = read
    return tuple(by_name.values())


def choose(chat: pb.Chat, tools: tuple[Tool, ...]) -> Choice:
    """What the caller's tool_choice and parallel_tool_calls allow. Raises Refusal."""
    choice, several = chat.tool_choice, not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
    kind = choice.WhichOneof("choice")
    if kind == "name":
        named = tuple(tool for tool in tools if tool.name == choice.name)
        if not named:
            names = ", ".join(tool.name for tool in tools[:8]) or "none"
            raise wrong(
                "chat.tool_choice.name", f"is {choice.name[:128]!r}, which is not a name of a tool; tools: {names}"
            )
        return Choice(named, Calls.EXACTLY_ONE)
    mode = choice.mode
    if mode == pb.TOOL_CHOICE_MODE_REQUIRED:
        if not tools:
            raise wrong("chat.tool_choice.mode", "is required, and chat.tools_json is empty")
        return Choice(tools, Calls.AT_LEAST_ONE if several else Calls.EXACTLY_ONE)
    if mode == pb.TOOL_CHOICE_MODE_NONE or not tools:
        return Choice((), Calls.NONE)
    return Choice(tools, Calls.ANY if several else Calls.AT_MOST_ONE)


def _tool(field: str, tool: object) -> Tool:
    body = _object(field, tool)
    if body.get("type", "function") != "function":
        raise wrong(f"{field}.type", f"is {_shown(body['type'])}; only 'function' is served")
    function = _object(f"{field}.function", body.get("function"))
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(
            f"{field}.function.name", f"is {_shown(name)}; it must be 1 to 128 letters, digits, '_', '.' or '-'"
        )
    for key in function.keys() - _FIELDS:
        raise wrong(f"{field}.function", f"has {_shown(key)}, which this server does not know")
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise wrong(f"{field}.function.strict", f"is {_shown(strict)}; it is a boolean")
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
        raise wrong(field, f"is {_shown(value)}; it must be a JSON object")
    return cast(Mapping[str, object], value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_json(text: str, refusal: Callable[[str], Exception], **hooks: Any) -> Any:
    """The JSON value in `text`, with `hooks` of json.loads. Raises what `refusal` makes of the reason."""
    try:
        value = json.loads(text, **hooks)
        # A string may hold half of a surrogate pair, which no tokenizer and no grammar takes.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise refusal(f"is nested more than {MAX_DEPTH} deep; the limit is {MAX_DEPTH}") from None
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise refusal(f"has {code}, half of a surrogate pair; only whole pairs are text") from None
    except ValueError as error:
        raise refusal(f"is not JSON: {str(error)[:200]}") from None
    return value


def type_of(value: object) -> str:
    """The type of a JSON value, as JSON schema names it."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "object")


def levels(value: object) -> Iterator[list[object]]:
    """The values in a JSON value, by their depth: itself, those right inside it, those inside these, and so on."""
    level = [value]
    while level:
        yield level
        around = cast(list[dict[str, Any] | list[Any]], [one for one in level if isinstance(one, dict | list)])
        level = [inner for one in around for inner in (one.values() if isinstance(one, dict) else one)]


def within(place: str, key: str) -> str:
    """The place of a key, as errors have it: `.properties.a`."""
    return f"{place}.{key}" if _PLAIN.fullmatch(key) else f"{place}[{json.dumps(key[:64])}]"


def inside(value: Any, place: str, pointer: str) -> tuple[Any, str] | None:
    """What a JSON pointer leads to from the value at `place`, and its own place; None if there is nothing."""
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        idx = int(key) if key.isdecimal() and len(key) <= _MAX_DIGITS else sys.maxsize
        if isinstance(value, list) and idx < len(cast("list[Any]", value)):
            value, place = cast("list[Any]", value)[idx], f"{place}[{idx}]"
        elif isinstance(value, dict) and key in value:
            value, place = cast("dict[str, Any]", value)[key], within(place, key)
        else:
            return None
    return value, place


def read_object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises Refusal."""
    value: object = read_json(text, partial(wrong, field), parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise wrong(field, f"is a JSON {type_of(value).replace('integer', 'number')}; it must be an object")
    fields = cast(dict[str, Any], value)
    if (depth := sum(any(isinstance(one, dict | list) for one in level) for level in levels(fields))) > MAX_DEPTH:
        refuse(field, f"is nested {depth} deep", MAX_DEPTH)
    return fields


def nearest_object(text: str) -> dict[str, Any]:
    """An object in place of text that `read_object` refuses.

    `null`, `""` and `[]` are an empty one, and an object that was written as a string is that object. All other text
    is an entry of its own, so nothing is lost.
    """
    try:
        value: object = json.loads(text)
        if value is None or value in ("", []):
            return {}
        if isinstance(value, str):
            return read_object("", value)
    except (ValueError, RecursionError, status.Refusal):
        pass
    return {"arguments": text}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    # Empty if the caller has none.
    id: str
    name: str
    # The arguments as the caller wrote them, and as a JSON object: the nearest one if they have another form.
    text: str
    arguments: dict[str, Any]
    is_object: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat. Empty texts stand for fields without a value."""

    role: str
    # Parts of text; none for a message without content.
    parts: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A checked chat. `tools` are as OpenAI's API has them."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    # Which calls the answer may have.
    choice: Choice
    template_args: dict[str, Any]
    continues: bool
    add_generation_prompt: bool

    def with_keys(self) -> Iterable[tuple[str, Any]]:
        """Every value with keys that the caller chose, and its field."""
        for idx, message in enumerate(self.messages):
            for call_idx, call in enumerate(message.calls):
                yield f"chat.messages[{idx}].tool_calls[{call_idx}].arguments_json", call.arguments
        for idx, tool in enumerate(self.tools):
            yield f"chat.tools_json[{idx}]", tool
        yield "chat.template_args_json", self.template_args


def check_size(chat: pb.Chat, max_chars: int) -> None:
    """Refuses too many messages or tools, and too much text, before any work on them."""
    _check_counts(chat)
    if not chat.messages:
        raise wrong("chat.messages", "is empty; at least 1 message is needed")
    # No text is kept: in a message ASCII takes a quarter of what it takes beside one emoji.
    num_chars = sum(map(len, chat.tools_json)) + len(chat.template_args_json)
    for message in chat.messages:
        num_chars += sum(map(len, message.content)) + len(message.reasoning) + len(message.name)
        num_chars += len(message.tool_call_id) + sum(
            len(call.id) + len(call.name) + len(call.arguments_json) for call in message.tool_calls
        )
    if num_chars > max_chars:
        refuse("chat", f"has {numbered(num_chars, 'character')}", max_chars)


def read(chat: pb.Chat) -> Conversation:
    """The chat's messages, tools and arguments, after `check_size`. Raises Refusal."""
    if chat.continue_final_message and chat.add_generation_prompt:
        what = "is true and chat.continue_final_message is true; the model either begins a message or continues one"
        raise wrong("chat.add_generation_prompt", what)
    tools = [read_object(f"chat.tools_json[{idx}]", text) for idx, text in enumerate(chat.tools_json)]
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    return Conversation(
        messages=[_message(f"chat.messages[{idx}]", message) for idx, message in enumerate(chat.messages)],
        tools=tools,
        choice=choose(chat, read_tools(tools)),
        template_args=_template_args(chat.template_args_json),
        continues=chat.continue_final_message,
        add_generation_prompt=begins,
    )


def _message(field: str, message: pb.ChatMessage) -> Message:
    role = message.role
    if role not in ROLES:
        raise wrong(f"{field}.role", f"is {role[:64]!r}; it must be one of {', '.join(ROLES)}")
    of_assistant = (("reasoning", bool(message.reasoning)), ("tool_calls", bool(message.tool_calls)))
    for name, is_set in (*of_assistant, ("tool_call_id", bool(message.tool_call_id))):
        owner = "tool" if name == "tool_call_id" else "assistant"
        if is_set and role != owner:
            raise wrong(f"{field}.{name}", f"is set in a message of {role}; only messages of {owner} have it")
    return Message(
        role=role,
        parts=tuple(message.content),
        reasoning=message.reasoning,
        calls=tuple(_call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _call(field: str, call: pb.ToolCall) -> PastCall:
    """Arguments of the history are never refused: a model or an agent wrote them, and the caller cannot mend them."""
    if not call.name:
        raise wrong(f"{field}.name", "is empty; at least 1 character is needed")
    text = call.arguments_json or "{}"
    try:
        arguments, is_object = read_object(f"{field}.arguments_json", text), True
    except status.Refusal:
        arguments, is_object = nearest_object(text), False
    return PastCall(id=call.id, name=call.name, text=text, arguments=arguments, is_object=is_object)


def _template_args(text: str) -> dict[str, Any]:
    field = "chat.template_args_json"
    args = read_object(field, text) if text else {}
    check_count(field, len(args), MAX_TEMPLATE_ARGS)
    for name in args:
        if name in RESERVED or name.endswith(("_token", "_tokens")):
            raise wrong(field, f"has {name[:64]!r}, which the server sets itself")
        if not name.isidentifier() or name.startswith("_"):
            raise wrong(
                field,
                f"has {name[:64]!r}; a name has letters, digits and underscores, and begins with a letter",
            )
    return args
