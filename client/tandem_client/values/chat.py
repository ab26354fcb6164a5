"""The parts of a conversation as frozen values. `types` has them, too.

Owns their names and their form as dicts, which is that of OpenAI's API.
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    # JSON, as the model wrote it. A call that was cut off is not complete JSON.
    arguments: str

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises ValueError if they are no JSON object, as those of a call that was cut off."""
        parsed: Any = json.loads(self.arguments)
        if not isinstance(parsed, dict):
            raise ValueError(f"the arguments of {self.name} are {self.arguments[:60]!r}; they must be a JSON object")
        return parsed  # pyright: ignore[reportUnknownVariableType]

    def as_dict(self) -> dict[str, Any]:
        """The call in the form of OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    # system, developer, user, assistant or tool.
    role: str
    # Text, or parts of text, which the model's template joins; None for a message without content.
    content: str | tuple[str, ...] | None = None
    # Of the assistant. Templates decide whether the model sees the reasoning again.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    # Of a tool: the call that it answers.
    tool_call_id: str = ""
    # The name of the speaker or of the tool.
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The message in the form of OpenAI's API, as `generate(chat=[...])` also takes it; without empty fields."""
        parts = [{"type": "text", "text": part} for part in self.content] if isinstance(self.content, tuple) else None
        made: dict[str, Any] = {"role": self.role, "content": self.content if parts is None else parts}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id:
            made["tool_call_id"] = self.tool_call_id
        if self.name:
            made["name"] = self.name
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A new piece of a tool call. The arguments of all pieces of one call, joined, are a JSON object."""

    # The number of the call in the answer, from 0.
    index: int
    # Both are set in the first piece of a call, and empty in others.
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as the model's template renders it."""

    text: str
    token_ids: tuple[int, ...]
