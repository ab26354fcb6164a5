"""Owns what one chat template takes: its trial, the shape that the trial finds, and the messages in that shape. Pure.

A template is tried when it is loaded: short chats are rendered, and their texts show what it takes. The messages are
dicts as in OpenAI's API, which Transformers' templates take.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from scheduler_svc.frontend.chat.calls import ID_CHARS, call_id
from scheduler_svc.frontend.chat.conversation import ROLES, Message, PastCall

# Between parts for a template that takes one text, as Transformers' own server joins them.
BETWEEN_PARTS = " "
_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")
# Renders messages with tools. Raises an error of the template.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]

# No template has these words.
_FIRST, _SECOND, _KEY, _NAME, _ROLE = "zqfirst", "zqsecond", "zqkey", "zqname", "zqrole"
_SHORT_IDS, _LONG_IDS = ("zqcall001", "zqcall002"), ("call_zq_0123456789abcdef", "call_zq_fedcba9876543210")
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "zqtool",
        "description": "A trial.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": []},
    },
}
# A part that a template printed whole, in Python's or in JSON's form.
_PRINTED = re.compile(r"""["']type\\?["']""")
_NOTHING: Mapping[str, str] = {}


class Content(StrEnum):
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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        other = [f"{name}: {value}" for name, value in values.items() if value != getattr(usual, name)]
        return ", ".join(other) or "usual"

    def messages(self, history: Sequence[Message]) -> list[dict[str, Any]]:
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
    return {"type": "text", "text": text}


def thinking_part(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text}


def _answered(message: Message, sent: list[_Sent]) -> _Sent:
    """The call that a message of a tool answers: that of its id, without one the first that has no answer yet."""
    if message.role == "tool":
        for idx, one in enumerate(sent):
            if message.tool_call_id in ("", one.given_id):
                return sent.pop(idx)
    return _Sent("", "", "")


def probe(render: Render) -> Shape:
    """The shape of a template. Raises jinja2's TemplateSyntaxError; other errors show what the template refuses."""
    return _Probe(render).shape()


class _Probe:
    """The trials of one template, each of which needs what the ones before have found."""

    def __init__(self, render: Render) -> None:
        from jinja2 import TemplateSyntaxError

        self._render, self._syntax_error = render, TemplateSyntaxError
        self._user = Content.TEXT
        # The form of arguments in messages with calls.
        self._arguments: Callable[[str], object] = _as_object
        self._besides: dict[str, Any] = {}

    def shape(self) -> Shape:
        self._user = self._content("user")
        as_object, as_text = self._try_arguments()
        content = {role: self._content(role) for role in ROLES}
        developer_is_system = self._developer_is_system(content["system"])
        reasoning = self._reasoning()
        return Shape(
            content={role: form for role, form in content.items() if form is not Content.TEXT},
            developer_is_system=developer_is_system,
            arguments_as_object=as_object or not as_text,
            arguments_as_text=as_text,
            most_calls=self._most_calls(),
            needs_content="content" in self._besides,
            needs_short_ids=self._loop() is not None and self._loop(ids=_LONG_IDS) is None,
            needs_tool_name=self._needs_tool_name(),
            reasoning=reasoning,
            reasoning_to_content=self._between(reasoning),
        )

    def _text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
        """What the template makes of messages; None if it refuses them."""
        try:
            return self._render(messages, tools)
        except self._syntax_error:
            raise
        except Exception:  # An error of jinja2, of the template itself, or of Python for a wrong type.
            return None

    def _content(self, role: str) -> Content:
        def seen(content: object, words: Iterable[str]) -> bool:
            text = self._around(role, content)
            return text is not None and all(word in text for word in words)

        takes_text = seen(_FIRST, [_FIRST])
        # A list that is printed as it is has its keys, besides those that the template writes in any case.
        usual = len(_PRINTED.findall(self._around(role, _FIRST) or ""))

        def reads(*words: str) -> bool:
            parts = [text_part(word) for word in words]
            return seen(parts, words) and len(_PRINTED.findall(self._around(role, parts) or "")) <= usual

        if reads(_FIRST, _SECOND):
            return Content.EITHER if takes_text else Content.PARTS
        return Content.ONE_PART if not takes_text and reads(_FIRST) else Content.TEXT

    def _around(self, role: str, content: object) -> str | None:
        """A short chat with a message of this role."""
        message = {"role": role, "content": content}
        if role == "tool":
            return self._loop((_KEY,), result=content)
        if role == "user":
            return self._text([message])
        if role == "assistant":
            return self._text([self._say(), message, self._say()])
        return self._text([message, self._say()])

    def _say(self) -> dict[str, Any]:
        is_text = self._user in (Content.TEXT, Content.EITHER)
        return {"role": "user", "content": "Hello" if is_text else [text_part("Hello")]}

    def _loop(
        self,
        words: Iterable[str] = (_FIRST,),
        *,
        ids: tuple[str, ...] = _SHORT_IDS,
        result: object = "Result",
        name: str = _NAME,
        reasoning: Mapping[str, str] = _NOTHING,
    ) -> str | None:
        """A question, calls with a word each as their argument, and their results."""
        pairs = list(zip(ids, words, strict=False))
        calls = [
            {"id": idx, "type": "function", "function": {"name": "zqtool", "arguments": self._arguments(word)}}
            for idx, word in pairs
        ]
        results = [{"role": "tool", "content": result, "tool_call_id": idx} for idx, _ in pairs]
        named = [{**message, "name": name} if name else message for message in results]
        asked = {"role": "assistant", "tool_calls": calls, **self._besides, **reasoning}
        return self._text([self._say(), asked, *named], [_TOOL])

    def _try_arguments(self) -> tuple[bool, bool]:
        """Returns whether the template writes arguments that are objects, and those that are text.

        Sets how later trials write calls.
        """
        for self._besides in ({}, {"content": ""}):
            self._arguments = _as_text
            takes_text = _as_text(_FIRST) in (text := self._loop() or "")
            self._arguments = _as_object
            made = self._loop() or ""
            # With quotes of Python's it is an object that was printed and not written as JSON.
            takes_object = _FIRST in made and _KEY in made and f"'{_KEY}'" not in made
            if text or made:
                self._arguments = _as_text if takes_text and not takes_object else _as_object
                return takes_object, takes_text
        self._besides = {}
        return False, False

    def _most_calls(self) -> int | None:
        one, two = self._loop(), self._loop((_FIRST, _SECOND))
        if one is not None and _FIRST not in one:
            return 0
        return 1 if two is not None and _SECOND not in two else None

    def _needs_tool_name(self) -> bool:
        named, bare = self._loop(), self._loop(name="")
        # Without its name nothing stands in its place.
        return named is not None and (bare is None or (_NAME in named and named.replace(_NAME, "") == bare))

    def _developer_is_system(self, form: Content) -> bool:
        """Whether the template takes `system`, and `developer` like any role that it does not know."""
        given = _FIRST if form in (Content.TEXT, Content.EITHER) else [text_part(_FIRST)]
        system, developer, other = (self._around(role, given) for role in ("system", "developer", _ROLE))
        if system is None or _FIRST not in system:
            return False
        if developer is None or _FIRST not in developer:
            return True
        return other is not None and developer.lower().replace("developer", _ROLE) == other.lower()

    def _reasoning(self) -> Reasoning:
        for where in (Reasoning.CONTENT_FIELD, Reasoning.FIELD):
            # Templates show it inside a tool loop, in the last message, or always.
            inside = self._loop((_SECOND,), reasoning={where.value: _FIRST})
            answer = {"role": "assistant", "content": "Hi", where.value: _FIRST}
            if any(text is not None and _FIRST in text for text in (inside, self._answered(answer))):
                return where
        text = self._answered(_reasoned(Reasoning.PART)) or ""
        is_written = _FIRST in text and _SECOND in text and not _PRINTED.search(text)
        return Reasoning.PART if is_written else Reasoning.CONTENT_FIELD

    def _between(self, where: Reasoning) -> str:
        """What stands between the reasoning and the content of the last message."""
        between, second, _ = (self._answered(_reasoned(where)) or "").partition(_FIRST)[2].partition(_SECOND)
        return between if second else ""

    def _answered(self, answer: dict[str, Any]) -> str | None:
        return self._text([self._say(), answer])


def _reasoned(where: Reasoning) -> dict[str, Any]:
    """An answer with a word of reasoning and one of content."""
    if where is Reasoning.PART:
        return {"role": "assistant", "content": [thinking_part(_FIRST), text_part(_SECOND)]}
    return {"role": "assistant", "content": _SECOND, where.value: _FIRST}


def _as_object(word: str) -> object:
    return {_KEY: word}


def _as_text(word: str) -> str:
    return json.dumps({_KEY: word})
