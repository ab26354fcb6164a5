"""Reads what a person types: history, several lines, completion of commands. Owns the keys.

Knows nothing of the conversation.
"""

from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

from tandem_client.cli.chat.commands import COMMANDS, is_complete
from tandem_client.cli.chat.settings import SETTINGS

_CONTINUATION = "... "


class Reader:
    """The prompt."""

    def __init__(self, history: Path | None, *, source: Input | None = None, output: Output | None = None) -> None:
        """`history`: None keeps it in memory. `source` and `output`: those of the process if None."""
        kept: History = InMemoryHistory() if history is None else FileHistory(history)
        self._session: PromptSession[str] = PromptSession(
            history=kept,
            multiline=True,
            key_bindings=_keys(),
            completer=_Commands(),
            complete_while_typing=Condition(self._is_command),
            prompt_continuation=_CONTINUATION,
            # Above the bottom of the screen, a menu has this many lines.
            reserve_space_for_menu=4,
            input=source,
            output=output,
        )

    async def read(self, prompt: str) -> str:
        """Returns what was typed. Raises KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D on an empty line."""
        return await self._session.prompt_async(prompt)

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


def _keys() -> KeyBindings:
    keys = KeyBindings()
    keys.add("enter")(_send)
    # Terminals send Alt-Enter as Escape and Enter.
    keys.add("escape", "enter")(_break_line)
    return keys


def _send(event: KeyPressEvent) -> None:
    if is_complete(event.current_buffer.text):
        event.current_buffer.validate_and_handle()
    else:
        _break_line(event)


def _break_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


class _Commands(Completer):
    """Names of commands and of settings, and files."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The words that may stand at the cursor."""
        text = document.text_before_cursor
        name, blank, argument = text.partition(" ")
        if not name.startswith("/") or "\n" in text:
            return
        if not blank:
            for each, (_, what) in COMMANDS.items():
                if each.startswith(name):
                    yield Completion(each, start_position=-len(name), display_meta=what)
        elif name == "/set" and " " not in argument:
            yield from (
                Completion(each, start_position=-len(argument)) for each in SETTINGS if each.startswith(argument)
            )
        elif name in ("/save", "/load"):
            yield from self._paths.get_completions(Document(argument), complete_event)
