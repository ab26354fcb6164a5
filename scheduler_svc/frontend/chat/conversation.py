"""Owns the check of a chat, and its messages as frozen values. Pure.

Knows nothing of templates or tokens; `shape` writes the messages as a template takes them. Every refusal is
INVALID_ARGUMENT and names the field, the number and the limit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tandem.v1 import chat_pb2 as pb

from scheduler_svc.frontend.chat.json_values import nearest_object, read_object
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes.limits import (
    MAX_CHAT_ARGS,
    MAX_CHAT_CALLS,
    MAX_CHAT_MESSAGES,
    MAX_CHAT_PARTS,
    MAX_CHAT_TOOLS,
    MAX_TOOL_NAME_CHARS,
)
from scheduler_svc.frontend.tools.tool import Choice, choose, read_tools

# Templates build tokens of them ('<|' + role + '|>'), so there are no others.
ROLES = ("system", "developer", "user", "assistant", "tool")
# What Transformers' call takes itself, what it gives the template, and what a template takes from its environment.
RESERVED = frozenset(
    [
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "special_tokens",
        "raise_exception",
        "strftime_now",
        "dict",
        "namespace",
        "range",
        "lipsum",
        "cycler",
        "joiner",
        "loop",
        "caller",
        "varargs",
        "kwargs",
        "super",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A call of a tool in the history of a chat."""

    # Empty if the caller has none.
    id: str
    name: str
    # The arguments as the caller wrote them, and as a JSON object: the nearest one if they are no object.
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
    _check_count("chat.messages", len(chat.messages), MAX_CHAT_MESSAGES)
    _check_count("chat.tools_json", len(chat.tools_json), MAX_CHAT_TOOLS)
    if not chat.messages:
        raise status.invalid("chat.messages", "chat.messages is empty; at least 1 message is needed")
    _check_count("chat.messages.content", sum(len(each.content) for each in chat.messages), MAX_CHAT_PARTS)
    _check_count("chat.messages.tool_calls", sum(len(each.tool_calls) for each in chat.messages), MAX_CHAT_CALLS)
    if (name_chars := len(chat.tool_choice.name)) > MAX_TOOL_NAME_CHARS:
        field = "chat.tool_choice.name"
        raise status.invalid(field, f"{field} is {name_chars} characters long; the limit is {MAX_TOOL_NAME_CHARS}")
    num_chars = sum(map(len, chat.tools_json)) + len(chat.template_args_json)
    for message in chat.messages:
        num_chars += sum(map(len, message.content)) + len(message.reasoning) + len(message.name)
        num_chars += len(message.tool_call_id) + sum(
            len(call.id) + len(call.name) + len(call.arguments_json) for call in message.tool_calls
        )
    if num_chars > max_chars:
        raise status.invalid("chat", f"chat has {num_chars} characters; the limit is {max_chars}")


def read(chat: pb.Chat) -> Conversation:
    """The chat's messages, tools and arguments, after `check_size`. Raises Refusal."""
    if chat.continue_final_message and chat.add_generation_prompt:
        message = (
            "chat.add_generation_prompt is true and chat.continue_final_message is true; the model either begins a "
            "message or continues one"
        )
        raise status.invalid("chat.add_generation_prompt", message)
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
        raise status.invalid(f"{field}.role", f"{field}.role is {role[:64]!r}; it must be one of {', '.join(ROLES)}")
    of_assistant = (("reasoning", bool(message.reasoning)), ("tool_calls", bool(message.tool_calls)))
    for name, is_set in (*of_assistant, ("tool_call_id", bool(message.tool_call_id))):
        owner = "tool" if name == "tool_call_id" else "assistant"
        if is_set and role != owner:
            raise status.invalid(
                f"{field}.{name}", f"{field}.{name} is set in a message of {role}; only messages of {owner} have it"
            )
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
        raise status.invalid(f"{field}.name", f"{field}.name is empty; at least 1 character is needed")
    text = call.arguments_json or "{}"
    try:
        arguments, is_object = read_object(f"{field}.arguments_json", text), True
    except status.Refusal:
        arguments, is_object = nearest_object(text), False
    return PastCall(id=call.id, name=call.name, text=text, arguments=arguments, is_object=is_object)


def _template_args(text: str) -> dict[str, Any]:
    field = "chat.template_args_json"
    args = read_object(field, text) if text else {}
    _check_count(field, len(args), MAX_CHAT_ARGS)
    for name in args:
        if name in RESERVED or name.endswith(("_token", "_tokens")):
            raise status.invalid(field, f"{field} has {name[:64]!r}, which the server sets itself")
        if not name.isidentifier() or name.startswith("_"):
            raise status.invalid(
                field,
                f"{field} has {name[:64]!r}; a name has letters, digits and underscores, and begins with a letter",
            )
    return args


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise status.invalid(field, f"{field} is {count} long; the limit is {limit}")
