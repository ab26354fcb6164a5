"""The state of a conversation: its messages, the system's message, the settings; its files, and that of what was typed.

The messages are OpenAI's dicts, which `generate(chat=...)` takes. Only their owner may read the files.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem_client.cli.flags import decoded
from tandem_client.errors import InvalidArgument
from tandem_client.types import ChatMessage, ModelInfo, ToolCall
from tandem_client.wire.parts import chat_prompt
from tandem_contract.private_file import MODE, private, put


def check(model: ModelInfo) -> None:
    """Raises InvalidArgument with the reason, and with what to do, if the service serves no chats."""
    if model.chat_refusal:
        hint = "tandem generate continues a text without a template"
        raise InvalidArgument(f"the service refuses chats: {model.chat_refusal.rstrip('.')}; {hint}")


class Session:
    """A conversation that ends with an answer, or with what the model is to answer."""

    def __init__(self, *, system: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.system = system
        # Keywords of `generate`.
        self.settings: dict[str, Any] = dict(settings or {})
        self._turns: list[dict[str, Any]] = []
        # Calls of the last answer that have no result yet.
        self._pending: list[ToolCall] = []
        # Turns and pending calls before the texts that have no answer yet.
        self._before: tuple[tuple[dict[str, Any], ...], tuple[ToolCall, ...]] = ((), ())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation, to send."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self._turns]

    @property
    def num_turns(self) -> int:
        """Messages without that of the system."""
        return len(self._turns)

    @property
    def pending_call(self) -> ToolCall | None:
        """The call of a tool that the next text answers; None if the next text is a message of the user."""
        return self._pending[0] if self._pending else None

    def say(self, text: str) -> bool:
        """Adds the user's message, or the result of the pending call. Returns whether the model is to answer."""
        if not self._turns or self._turns[-1]["role"] == "assistant":
            self._before = (tuple(self._turns), tuple(self._pending))
        if self._pending:
            call = self._pending.pop(0)
            self._turns.append({"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name})
        else:
            self._turns.append({"role": "user", "content": text})
        return not self._pending

    def answered(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> bool:
        """Adds the answer, or the part of it that has come. Returns whether anything was kept.

        A call that was cut off is not JSON, and the service would refuse it; it is dropped. If nothing is left, so is
        what was asked: most templates refuse two messages of the user in a row.
        """
        whole = tuple(call for call in calls if _is_whole(call))
        if not text and not whole:
            self.retract()
            return False
        message = ChatMessage(role="assistant", content=text or None, reasoning=reasoning, tool_calls=whole)
        self._turns.append(message.as_dict())
        self._pending = list(whole)
        return True

    def retract(self) -> None:
        """Goes back to where the conversation was before the texts without an answer, or before `reopen`."""
        self._turns, self._pending = list(self._before[0]), list(self._before[1])

    def reopen(self) -> bool:
        """Drops the last answer, so that it can be asked for again. Returns whether there was one."""
        if len(self._turns) < 2 or self._turns[-1]["role"] != "assistant":
            return False
        self._before = (tuple(self._turns), tuple(self._pending))
        self._turns.pop()
        self._pending = []
        return True

    def clear(self) -> None:
        """Drops all messages except the system's."""
        self._turns, self._pending = [], []

    def saved(self) -> dict[str, Any]:
        return {"messages": self.messages, "settings": self.settings}

    def save(self, path: Path, *, overwrite: bool) -> None:
        """Writes the conversation as a whole or not at all. Raises FileExistsError unless it may overwrite; OSError."""
        text = json.dumps(self.saved(), ensure_ascii=False, indent=1) + "\n"
        put(path.resolve(), text.encode(), os.replace if overwrite else os.link)

    def load(self, path: Path) -> str | None:
        """Goes on with the conversation of a file that `save` wrote; returns the text of any other file.

        Raises ValueError for a text that is too long or not UTF-8, and for content other than a conversation; OSError.
        """
        with path.open("rb") as file:
            text = decoded(file, str(path))
        try:
            saved: Any = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not isinstance(saved, dict) or "messages" not in saved:
            return text
        try:
            self.restore(saved)  # pyright: ignore[reportUnknownArgumentType]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a saved conversation: {error}") from None
        return None

    def restore(self, saved: object) -> None:
        """Takes the place of this conversation. Raises ValueError, TypeError if `saved` is not a conversation."""
        messages: Any = saved.get("messages") if isinstance(saved, dict) else saved  # pyright: ignore
        if not isinstance(messages, list):
            raise ValueError("it has no list of messages")
        chat_prompt(messages)  # pyright: ignore[reportUnknownArgumentType]
        turns: list[dict[str, Any]] = list(messages)  # pyright: ignore[reportUnknownArgumentType]
        has_system = bool(turns) and turns[0]["role"] == "system" and isinstance(turns[0].get("content"), str)
        self.system = turns.pop(0)["content"] if has_system else None
        # A saved conversation ends with an answer, unless another program wrote it.
        while turns and turns[-1]["role"] != "assistant":
            turns.pop()
        calls = turns[-1].get("tool_calls") or () if turns else ()
        names = [(call.get("id", ""), call["function"].get("name", "")) for call in calls]
        self._turns, self._pending = turns, [ToolCall(id=idx, name=name, arguments="") for idx, name in names]


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Makes the file of the history, by the XDG rules; None if it cannot be written."""
    base = environment.get("XDG_STATE_HOME") or ""
    with contextlib.suppress(OSError, RuntimeError):
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "tandem"
        path = folder / "chat_history"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "ab", opener=lambda name, flags: private(name, flags | os.O_NOFOLLOW)) as file:
            os.fchmod(file.fileno(), MODE)
        return path
    return None


def _is_whole(call: ToolCall) -> bool:
    try:
        call.parsed_arguments()
    except ValueError:
        return False
    return True
