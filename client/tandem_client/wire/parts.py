"""Builds the parts of a request from keywords: conversations and constraints, and a caller's value in one field.

Messages are dicts in OpenAI's form, or `ChatMessage`. Owns the keywords of chats and constraints, the fields that they
set, and the errors for values that do not fit, which name the keyword. Checks the form only; the service checks every
limit and every role, and reads the constraint.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import chat_pb2, constraint_pb2, inference_pb2, limits_pb2

from tandem_client.types import ChatMessage

_Message = TypeVar("_Message", bound=Message)
# The range of each kind of integer field.
_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# The numbers of SamplingParams, all of which are keywords: their types, and the values that change nothing (None: of
# the seed).
SAMPLING: Mapping[str, tuple[type[int] | type[float], float | None]] = {
    field.name: (float if field.cpp_type == field.CPPTYPE_FLOAT else int, limit.off if limit.HasField("off") else None)
    for field in inference_pb2.SamplingParams.DESCRIPTOR.fields
    if field.message_type is None and not field.is_repeated
    for limit in [field.GetOptions().Extensions[limits_pb2.limit]]
}
# Options for which every service refuses 0.
_FROM_ONE = frozenset({"max_new_tokens", "num_samples"})

# {"role": "user", "content": "Hello"}, as in OpenAI's API.
ChatMessages = Iterable[ChatMessage | Mapping[str, Any]]
# As in OpenAI's API: one of these, or {"type": "function", "function": {"name": "..."}}.
TOOL_CHOICES = ("auto", "none", "required")
ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]


def assign(name: str, message: Any, field: str, value: Any) -> None:
    """Sets a field of a message to a value that a caller gave.

    Raises TypeError for a value of the wrong type and ValueError for a number that the field cannot hold or a text with
    half a surrogate pair, both beginning with `name`.
    """
    descriptor: FieldDescriptor = message.DESCRIPTOR.fields_by_name[field]
    try:
        if descriptor.message_type is not None:
            # The only messages here are the entries of maps.
            entries: object = value
            if not isinstance(entries, Mapping):
                raise TypeError("a mapping from token ids to numbers is needed")
            for key, entry in cast(Mapping[Any, Any], entries).items():
                getattr(message, field)[key] = entry
        elif descriptor.is_repeated:
            getattr(message, field).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, field, value)
    except UnicodeEncodeError as error:
        # Python's strings may hold half a surrogate pair; it decodes bytes that are not UTF-8 into such strings.
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"{name} has {code} at character {error.start}; it is not Unicode text") from None
    except (TypeError, ValueError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        why = str(error)
        which = "each" if descriptor.is_repeated else "it"
        if descriptor.message_type is not None:
            which, descriptor = "each token id", descriptor.message_type.fields_by_name["key"]
        if isinstance(error, ValueError) and descriptor.cpp_type in _RANGES:
            low, high = _RANGES[descriptor.cpp_type]
            why = f"{which} must be {max(low, 1) if name in _FROM_ONE else low} to {high}"
        raise type(error)(f"{name} is {shown}; {why}") from None


def fill(message: _Message, place: str = "", **values: Any) -> _Message:
    """Sets fields by their names, and leaves those with value None unset. Raises as `assign`.

    `place`: what stands before a name in an error.
    """
    for name, value in values.items():
        if value is not None:
            assign(f"{place}{name}", message, name, value)
    return message


def numbers_of(enum: EnumDescriptor) -> Mapping[str, int]:
    """The numbers of an enum by their names in small letters, without the name of the enum, and without the first."""
    first, *others = enum.values
    return {value.name.removeprefix(first.name.removesuffix("UNSPECIFIED")).lower(): value.number for value in others}


def number_of(name: str, word: str, enum: EnumDescriptor) -> int:
    """The number of a caller's word. Raises ValueError, which begins with `name`."""
    numbers = numbers_of(enum)
    if word.lower() not in numbers:
        *words, last = numbers
        raise ValueError(f"{name} is {word!r}; it must be {', '.join(words)} or {last}")
    return numbers[word.lower()]


def json_text(name: str, value: object) -> str:
    """Returns a mapping as JSON, or the text of a JSON object as it is. Raises TypeError, ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r:.60}; a mapping is needed")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be written as JSON: {error}") from None


class ChatOptions(TypedDict, total=False):
    """The options of a chat. None means the default, as if the option were absent."""

    # {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema, "strict": bool}}.
    tools: Iterable[Mapping[str, Any]] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    # Arguments of the model's template, such as {"enable_thinking": False}.
    template_args: Mapping[str, Any] | None
    # The model continues the last message instead of beginning a new one.
    continue_final_message: bool | None
    add_generation_prompt: bool | None


class ChatKeywords(ChatOptions, total=False):
    """The options of a chat that is answered."""

    # False: the whole answer is text, with the model's own marks of reasoning and tool calls.
    parsed: bool | None


# Messages of a GenerateRequest with fields that have keywords of their own. Fields of other messages share one keyword.
_GROUPS = ("chat", "constraint", "sampling", "stop", "output", "cache", "resume")
# Keywords that differ from the field's name.
_OTHER_NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat.messages": "chat",
    "chat.tools_json": "tools",
    "chat.template_args_json": "template_args",
    "chat.unparsed": "parsed",
    "stop.stop_strings": "stop",
    "cache.salt": "cache_salt",
    "cache.bypass_read": "bypass_cache_read",
    "cache.bypass_write": "bypass_cache_write",
}


def _keywords(message: Descriptor, prefix: str = "", keyword: str = "") -> Iterator[tuple[str, str]]:
    """The paths of a message's fields and of their parts, each with its keyword; `keyword`: that of the message."""
    for field in message.fields:
        path = f"{prefix}{field.name}"
        named = "" if path in _GROUPS else keyword or _OTHER_NAMES.get(path, field.name)
        if named:
            yield path, named
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _keywords(field.message_type, f"{path}.", named)


# Path of a field of GenerateRequest to the keyword that sets it, as errors need it; a chat as a whole is named, too.
FIELD_KEYWORDS: Mapping[str, str] = {"chat": "chat", **dict(_keywords(inference_pb2.GenerateRequest.DESCRIPTOR))}
CHAT_FIELDS, CONSTRAINT_FIELDS = (
    {path: keyword for path, keyword in FIELD_KEYWORDS.items() if path.partition(".")[0] == group}
    for group in ("chat", "constraint")
)
# Ignored in messages, their parts and their calls. Agents send answers of earlier turns back with all fields that some
# other server or library has given them.
IGNORED_IN_MESSAGES = (
    "annotations", "cache_control", "extra_content", "images", "index", "parsed", "parsed_arguments", "prefix",
    "prompt_cache_breakpoint", "provider_specific_fields", "reasoning_details", "thinking_blocks",
)  # fmt: skip
# Kinds of parts that are text, and where it stands.
TEXT_PARTS: Mapping[str, str] = {"text": "text", "refusal": "refusal"}
_OF_MESSAGE = ("role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "name", "refusal")


def chat_prompt(messages: ChatMessages, **options: Unpack[ChatKeywords]) -> chat_pb2.Chat:
    """Returns the conversation. Raises TypeError, ValueError, which name the keyword and the place in it."""
    made = chat_pb2.Chat()
    if isinstance(messages, str | Mapping | ChatMessage):
        raise TypeError(f"chat is {messages!r:.60}; a list of messages is needed")
    for idx, message in enumerate(messages):
        _set_message(f"chat[{idx}]", made.messages.add(), message)
    for name, value in options.items():
        match name:
            case _ if value is None:
                continue
            case "tools":
                tools = cast(Iterable[object], value)
                made.tools_json.extend(json_text(f"tools[{idx}]", tool) for idx, tool in enumerate(tools))
            case "tool_choice":
                made.tool_choice.CopyFrom(_tool_choice(value))
            case "template_args":
                made.template_args_json = json_text("template_args", value)
            case "parsed":
                made.unparsed = not value
            case _:
                assign(name, made, name, value)
    return made


def _set_message(place: str, made: chat_pb2.ChatMessage, given: object) -> None:
    values = _known(place, given.as_dict() if isinstance(given, ChatMessage) else given, _OF_MESSAGE)
    if "role" not in values:
        raise TypeError(f"{place} has no role")
    for name in ("role", "tool_call_id", "name"):
        if name in values:
            assign(f"{place}.{name}", made, name, values[name])
    reasoning = values.get("reasoning", values.get("reasoning_content"))
    if reasoning is not None:
        assign(f"{place}.reasoning", made, "reasoning", reasoning)
    if "content" in values:
        content = values["content"]
        parts = [content] if isinstance(content, str) else _parts(f"{place}.content", content)
        assign(f"{place}.content", made, "content", parts)
    elif "refusal" in values:
        assign(f"{place}.refusal", made, "content", values["refusal"])
    for idx, call in enumerate(values.get("tool_calls", ())):
        _set_call(f"{place}.tool_calls[{idx}]", made.tool_calls.add(), call)


def _parts(place: str, given: object) -> list[str]:
    """The texts of content that is a list of parts: {"type": "text", "text": "..."}."""
    if not isinstance(given, Sequence):
        raise TypeError(f"{place} is {given!r:.60}; text or a list of parts is needed")
    texts: list[str] = []
    for idx, part in enumerate(cast(Sequence[object], given)):
        values = _known(f"{place}[{idx}]", part, None)
        kind = values.get("type")
        text = values.get(TEXT_PARTS.get(str(kind), ""))
        if not isinstance(text, str):
            raise ValueError(f"{place}[{idx}] is of type {kind}; only parts of type text are taken")
        texts.append(text)
    return texts


def _set_call(place: str, made: chat_pb2.ToolCall, given: object) -> None:
    call = _known(place, given, ("id", "type", "function"))
    function = _known(f"{place}.function", call.get("function"), ("name", "arguments"))
    assign(f"{place}.id", made, "id", call.get("id", ""))
    assign(f"{place}.function.name", made, "name", function.get("name", ""))
    arguments = function.get("arguments", "")
    if isinstance(arguments, list):
        # Models write such arguments, and agents send them back.
        arguments = json.dumps(arguments)
    arguments = json_text(f"{place}.function.arguments", arguments)
    assign(f"{place}.function.arguments", made, "arguments_json", arguments)


def _known(place: str, given: object, names: Iterable[str] | None) -> dict[str, Any]:
    """The entries of a dict that have a value. Raises TypeError for one that is not known; None: all are."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{place} is {given!r:.60}; a mapping is needed")
    entries = cast(Mapping[str, Any], given)
    # Libraries write every field that a message could have, most of them null or empty.
    values = {name: value for name, value in entries.items() if value is not None}
    if names is not None:
        allowed = {*names, *IGNORED_IN_MESSAGES}
        unknown = [name for name, value in values.items() if name not in allowed and value not in ([], {}, "")]
        if unknown:
            raise TypeError(f"{place} has {unknown[0]}; known are {', '.join(names)}")
    return values


def _tool_choice(given: object) -> chat_pb2.ToolChoice:
    if isinstance(given, Mapping):
        function = cast(Mapping[str, Any], given).get("function")
        if isinstance(function, Mapping) and isinstance(name := cast(Mapping[str, Any], function).get("name"), str):
            made = chat_pb2.ToolChoice()
            assign("tool_choice", made, "name", name)
            return made
    if not isinstance(given, str) or given not in TOOL_CHOICES:
        form = '{"type": "function", "function": {"name": "..."}}'
        raise ValueError(f"tool_choice is {given!r:.60}; it must be auto, none, required, or {form}")
    return chat_pb2.ToolChoice(mode=cast(Any, numbers_of(chat_pb2.ToolChoiceMode.DESCRIPTOR)[given]))


class ConstraintOptions(TypedDict, total=False):
    """What an output may be; at most one of these. None means no constraint."""

    # A JSON schema as a dict, as True for any JSON, or as JSON text. Properties come in its order.
    json_schema: Mapping[str, Any] | bool | str | None
    # True: any JSON object.
    json_object: bool | None
    # A regular expression, which matches the whole output.
    regex: str | None
    # One of these strings.
    choices: Iterable[str] | None
    # A grammar in llguidance's dialect of Lark.
    lark: str | None


def constraint(**options: Unpack[ConstraintOptions]) -> constraint_pb2.Constraint | None:
    """Returns the constraint; None without one. Raises TypeError, ValueError, which name the keyword."""
    given = cast(dict[str, Any], {name: value for name, value in options.items() if value is not None})
    if given.get("json_object") is False:
        del given["json_object"]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; an output has one constraint")
    made = constraint_pb2.Constraint()
    ((name, value),) = given.items()
    match name:
        case "json_schema":
            # False would allow nothing.
            text = "true" if value is True else json_text("json_schema", value)
            assign("json_schema", made, "json_schema", text)
        case "json_object":
            if value is not True:
                raise TypeError(f"json_object is {value!r:.60}; it must be True or False")
            made.json_object.SetInParent()
        case "choices":
            if isinstance(value, str):
                raise TypeError(f"choices is {value!r:.60}; a list of strings is needed")
            made.choices.SetInParent()
            assign("choices", made.choices, "choices", value)
        case _:
            assign(name, made, name, value)
    return made
