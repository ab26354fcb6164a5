"""Owns what one chat template takes, as a frozen value, and the messages of a chat in that shape. Pure.

`probe` finds the shape when a template is loaded. The messages are dicts as in OpenAI's API, which Transformers'
templates take.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from scheduler_svc.frontend.chat.calls import ID_CHARS, call_id
from scheduler_svc.frontend.chat.conversation import Message, PastCall

# Between parts for a template that takes one text, as Transformers' own server joins them.
BETWEEN_PARTS = " "
_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")


class Content(StrEnum):
    """The form of the content of a role's messages."""

    TEXT = "text"
    # A list of all parts.
    PARTS = "parts"
    # A list with one part: the template reads no other.
    ONE_PART = "one part"
    # One part as text, several as a list, which the template joins in its own way.
    EITHER = "text or parts"


class Reasoning(StrEnum):
    """Where the reasoning of earlier messages stands."""

    CONTENT_FIELD = "reasoning_content"
    FIELD = "reasoning"
    # A part of the content.
    PART = "thinking"


class _Sent(NamedTuple):
    """A call that no message of a tool has answered yet."""

    given_id: str
    written_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a template takes. A field that is not given has the value that fits most templates."""

    # By role; a role that is missing takes text.
    content: Mapping[str, Content] = field(default_factory=dict[str, Content])
    # The template knows no `developer`.
    developer_is_system: bool = False
    arguments_as_object: bool = True
    arguments_as_text: bool = False
    # Calls of one message that the template shows; None: all of them.
    most_calls: int | None = None
    # A message without content has an empty one.
    needs_content: bool = False
    # Ids of calls have 9 letters and digits.
    needs_short_ids: bool = False
    # A result has the name of its tool.
    needs_tool_name: bool = False
    reasoning: Reasoning = Reasoning.CONTENT_FIELD
    # What stands between the reasoning of an answer and its content; empty if the template does not show both.
    reasoning_to_content: str = ""

    def __str__(self) -> str:
        """The fields that differ from those of most templates."""
        usual = Shape()
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        other = [f"{name}: {value}" for name, value in found.items() if value != getattr(usual, name)]
        return ", ".join(other) or "usual"

    def messages(self, history: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template takes them."""
        sent = list[_Sent]()
        return [self._message(idx, message, sent) for idx, message in enumerate(history)]

    def _message(self, idx: int, message: Message, sent: list[_Sent]) -> dict[str, Any]:
        role = "system" if message.role == "developer" and self.developer_is_system else message.role
        made: dict[str, Any] = {"role": role}
        if message.parts:
            made["content"] = self._content(role, message.parts)
        elif self.needs_content:
            made["content"] = ""
        if message.reasoning and self.reasoning is Reasoning.PART:
            made["content"] = [thinking_part(message.reasoning), *map(text_part, message.parts)]
        elif message.reasoning:
            made[self.reasoning.value] = message.reasoning
        if message.calls:
            sent[:] = [_Sent(call.id, self._id(call.id, idx, i), call.name) for i, call in enumerate(message.calls)]
            made["tool_calls"] = [self._call(call, one) for call, one in zip(message.calls, sent, strict=True)]
        answered = _answered(message, sent)
        given_id = message.tool_call_id
        if written_id := self._id(given_id, idx, 0) if given_id else answered.written_id:
            made["tool_call_id"] = written_id
        if name := message.name or (answered.name if self.needs_tool_name else ""):
            made["name"] = name
        return made

    def _content(self, role: str, parts: tuple[str, ...]) -> object:
        form = self.content.get(role, Content.TEXT)
        if form is Content.TEXT or (form is Content.EITHER and len(parts) == 1):
            return BETWEEN_PARTS.join(parts)
        return [text_part(part) for part in ((BETWEEN_PARTS.join(parts),) if form is Content.ONE_PART else parts)]

    def _call(self, call: PastCall, sent: _Sent) -> dict[str, Any]:
        as_text = self.arguments_as_text and not (self.arguments_as_object and call.is_object)
        function = {"name": call.name, "arguments": call.text if as_text else call.arguments}
        made: dict[str, Any] = {"type": "function", "function": function}
        return {"id": sent.written_id, **made} if sent.written_id else made

    def _id(self, given: str, message_idx: int, call_idx: int) -> str:
        if not self.needs_short_ids or _SHORT_ID.fullmatch(given):
            return given
        # Equal ids stay equal, and calls without one get different ones.
        return call_id(given, 0, 0) if given else call_id("", message_idx, call_idx)


def text_part(text: str) -> dict[str, str]:
    """A part of content."""
    return {"type": "text", "text": text}


def thinking_part(text: str) -> dict[str, str]:
    """A part of content that is reasoning."""
    return {"type": "thinking", "thinking": text}


def _answered(message: Message, sent: list[_Sent]) -> _Sent:
    """The call that a message of a tool answers: that of its id, without one the first that has no answer yet."""
    if message.role == "tool":
        for idx, one in enumerate(sent):
            if message.tool_call_id in ("", one.given_id):
                return sent.pop(idx)
    return _Sent("", "", "")
