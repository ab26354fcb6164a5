"""Reads one message of a conversation: its text parts, its tool calls, what it answers.

Images, sound and files are refused, because no served model reads them here. The service checks roles.
"""

from typing import cast

from tandem.v1 import chat_pb2

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.openai.constraint import json_text
from tandem_client.gateway.openai.fields import Fields, object_of, shown, text_of, wrong
from tandem_client.wire.chat import IGNORED_IN_MESSAGES, TEXT_PARTS

_WITHOUT_EFFECT = {"audio": (), "function_call": ()}


def add_message(value: object, name: str, chat: chat_pb2.Chat) -> None:
    """Appends the message of this name. Raises HttpError."""
    fields, message = object_of(value, name), chat.messages.add()
    role = fields.text("role")
    if role is None:
        raise fields.required("role")
    message.role = role
    _set_content(fields, message)
    message.reasoning = fields.text("reasoning_content") or fields.text("reasoning") or ""
    # The second of the two names, if the first was set.
    fields.drop("reasoning", *IGNORED_IN_MESSAGES)
    for i, call in enumerate(fields.items("tool_calls") or ()):
        _add_call(object_of(call, f"{name}.tool_calls[{i}]"), message)
    message.tool_call_id = fields.text("tool_call_id") or ""
    message.name = fields.text("name") or ""
    fields.same_as_unset(_WITHOUT_EFFECT)
    fields.end()


def _set_content(fields: Fields, message: chat_pb2.ChatMessage) -> None:
    content, refused = fields.any("content"), fields.text("refusal")
    if isinstance(content, str):
        message.content.append(text_of(content, fields.name("content")))
    elif isinstance(content, list):
        parts = cast(list[object], content)
        message.content.extend(_part(part, f"{fields.name('content')}[{i}]") for i, part in enumerate(parts))
    elif content is not None:
        raise wrong(fields.name("content"), content, "a string or a list of parts")
    elif refused is not None:
        message.content.append(refused)


def _part(value: object, name: str) -> str:
    if isinstance(value, str):
        return text_of(value, name)
    part = object_of(value, name)
    kind = part.text("type") or ""
    if kind not in TEXT_PARTS:
        raise invalid(name, f"{name} has the type {shown(kind)}; only text parts are supported")
    text = part.text(TEXT_PARTS[kind])
    if text is None:
        raise part.required(TEXT_PARTS[kind])
    part.drop(*IGNORED_IN_MESSAGES)
    part.end()
    return text


def _add_call(fields: Fields, message: chat_pb2.ChatMessage) -> None:
    call = message.tool_calls.add()
    call.id = fields.text("id") or ""
    kind = fields.text("type")
    if kind not in (None, "function"):
        raise invalid(fields.name("type"), f"{fields.name('type')} is {shown(kind)}; it must be function")
    function = fields.inner("function")
    if function is None:
        raise fields.required("function")
    call.name = text_of(function.any("name"), function.name("name"))
    arguments = function.any("arguments")
    # A string in OpenAI's API; some programs send the value itself. The service takes any.
    is_text = isinstance(arguments, str)
    call.arguments_json = (
        text_of(arguments, function.name("arguments")) if is_text else "" if arguments is None else json_text(arguments)
    )
    function.drop(*IGNORED_IN_MESSAGES)
    function.end()
    fields.drop(*IGNORED_IN_MESSAGES)
    fields.end()
