"""The loop of a conversation: reads a text, carries out commands, asks for answers.

Owns the commands, which are lines that begin with a slash, the settings of `/set`, the keys, and the terminal between
two prompts. The session has the conversation; the screen has the rest of the terminal.
"""

import contextlib
import json
import os
import sys
import termios
from collections.abc import Callable, Generator, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from rich.console import Console

from tandem_client import errors
from tandem_client.async_client import AsyncClient
from tandem_client.cli.chat.answer import ask
from tandem_client.cli.chat.screen import Screen, new_screen
from tandem_client.cli.chat.session import Session, check, history_path
from tandem_client.cli.plain import plain
from tandem_client.cli.reporting import describe
from tandem_client.types import ModelInfo
from tandem_client.wire.parts import SAMPLING
from tandem_contract.plural import counted

_CONTINUATION = "... "
_PATHS = PathCompleter(expanduser=True)
_PROMPT = "> "
_TIMEOUT_SECONDS = 30.0


def _json_object(text: str) -> dict[str, Any]:
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value  # pyright: ignore[reportUnknownVariableType]


# Keywords of `generate`: how a value is read, and what it must be. An answer is one sample.
SETTINGS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    **{
        name: (kind, "a number" if kind is float else "a whole number")
        for name, (kind, _) in SAMPLING.items()
        if name != "num_samples"
    },
    "max_new_tokens": (int, "a whole number"),
    "template_args": (_json_object, 'a JSON object, such as {"enable_thinking": false}'),
}
# Name: argument, description.
COMMANDS = {
    "/help": ("", "this list"),
    "/clear": ("", "forget the conversation; the system's message and the settings stay"),
    "/system": ("[TEXT]", "set the system's message and begin again; without TEXT show it; - removes it"),
    "/set": ("[NAME [VALUE]]", f"change a setting ({', '.join(SETTINGS)}); without VALUE back to the default"),
    "/regen": ("", "answer the last message again"),
    "/tokens": ("", "how many tokens the conversation has"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/load": ("FILE", "go on with a conversation that was saved"),
    "/quit": ("", "leave, as Ctrl-D does"),
}
_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter", 'a new line; or put a text of several lines between """ and """'),
    ("Up, Down", "earlier messages"),
    ("Ctrl-C", "end the answer, or empty the line"),
    ("Ctrl-D", "leave"),
)
_ALIASES = {"/exit": "/quit", "/bye": "/quit", "/?": "/help"}
_QUOTES = '"""'


def parse_setting(name: str, text: str) -> Any:
    """Returns the value of a setting; None for an empty text, which stands for the default. Raises ValueError."""
    if name not in SETTINGS:
        raise ValueError(f"{name[:40]!r} is not a setting; there are {', '.join(SETTINGS)}")
    read, kind = SETTINGS[name]
    if not text:
        return None
    try:
        return read(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {text[:40]!r}; it must be {kind}") from None


def parse(text: str) -> tuple[str, str]:
    """Returns a command and its argument, or "" and the message to send. Raises ValueError for an unknown command.

    A message between triple quotes loses them, and begins with a slash if it likes to.
    """
    stripped = text.strip()
    if stripped.startswith(_QUOTES):
        return "", stripped.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    if not text.startswith("/"):
        return "", stripped
    name, _, argument = stripped.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands."
        raise ValueError(f"{name[:40]} is not a command; {hint} A blank before the slash makes it a message.")
    usage, _ = COMMANDS[name]
    if argument and not usage:
        raise ValueError(f"{name} takes no argument")
    if not argument.strip() and usage and not usage.startswith("["):
        raise ValueError(f"{name} needs {usage}")
    return name, argument.strip()


def is_complete(text: str) -> bool:
    """Whether Enter sends the text: not within triple quotes."""
    stripped = text.strip()
    return not stripped.startswith(_QUOTES) or (len(stripped) >= 2 * len(_QUOTES) and stripped.endswith(_QUOTES))


def help_lines() -> list[tuple[str, str]]:
    return [*((f"{name} {usage}".strip(), what) for name, (usage, what) in COMMANDS.items()), *_KEYS]


@contextlib.contextmanager
def without_echo() -> Generator[None, None, None]:
    """Switches the echo of standard input off: keys are not echoed into an answer, and wait for the next prompt.

    Ctrl-C still interrupts, and drops them. The prompt switches to its own mode and back.
    """
    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    silent = [*before]
    # The prompt reads single keys. In lines, Enter and Ctrl-D would not reach it as such.
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    # TCSADRAIN keeps what was typed ahead.
    termios.tcsetattr(handle, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


class _KeptHistory(FileHistory):
    """Keeps what was typed in the file. On a full disk it is kept for this conversation alone."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def new_prompt(history: Path | None, output: Output | None) -> PromptSession[str]:
    """Returns the prompt. `history`: None keeps it in memory. `output`: that of the process if None."""
    keys = KeyBindings()
    keys.add("enter")(_send)
    # Terminals send Alt-Enter as Escape and Enter.
    keys.add("escape", "enter")(_break_line)
    kept: History = InMemoryHistory() if history is None else _KeptHistory(history)
    session: PromptSession[str] = PromptSession(
        history=kept,
        multiline=True,
        key_bindings=keys,
        completer=_Commands(),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        prompt_continuation=_CONTINUATION,
        # Above the bottom of the screen, a menu has this many lines.
        reserve_space_for_menu=4,
        output=output,
    )
    return session


def _send(event: KeyPressEvent) -> None:
    if is_complete(event.current_buffer.text):
        event.current_buffer.validate_and_handle()
    else:
        _break_line(event)


def _break_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


class _Commands(Completer):
    """Names of commands and of settings, and files."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, blank, argument = text.partition(" ")
        if not name.startswith("/") or "\n" in text:
            return
        if not blank:
            for command, (_, what) in COMMANDS.items():
                if command.startswith(name):
                    yield Completion(command, start_position=-len(name), display_meta=what)
        elif name == "/set" and " " not in argument:
            yield from (
                Completion(setting, start_position=-len(argument))
                for setting in SETTINGS
                if setting.startswith(argument)
            )
        elif name in ("/save", "/load"):
            yield from _PATHS.get_completions(Document(argument), complete_event)


class Loop:
    def __init__(
        self, client: AsyncClient, session: Session, screen: Screen, prompt: PromptSession[str], model: ModelInfo
    ) -> None:
        self._client, self._session = client, session
        self._screen, self._prompt, self._model = screen, prompt, model
        # Files that this conversation was read from or written to, which it may overwrite.
        self._own_files: set[Path] = set()

    async def run(self, first: str = "") -> None:
        """Talks until the person leaves. `first`: a message that is sent at once."""
        model = self._model
        self._screen.note(f"{model.model}, {counted(model.max_length, 'token')}; /help lists commands, Ctrl-D leaves")
        if first:
            await self._send(first)
        while True:
            try:
                call = self._session.pending_call
                prompt = _PROMPT if call is None else f"result of {plain(call.name)}> "
                text = await self._prompt.prompt_async(prompt)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            try:
                if not await self._take(text):
                    return
            except errors.TandemError as error:
                self._screen.note(f"error: {describe(error, of_generate=None)}")
            except OSError as error:
                self._screen.note(f"error: {error.filename}: {error.strerror}")
            except (TypeError, ValueError) as error:
                self._screen.note(f"error: {error}")

    async def _take(self, text: str) -> bool:
        """Carries out what was typed. Returns whether the conversation goes on."""
        command, given = parse(text)
        if command:
            return await self._carry_out(command, given)
        if given or self._session.pending_call is not None:
            await self._send(given)
        return True

    async def _send(self, text: str) -> None:
        if self._session.say(text):
            await self._answer()

    async def _answer(self) -> None:
        answer = await ask(self._client, self._screen, self._session.messages, self._session.settings)
        kept = False
        if answer.error is None:
            kept = self._session.answered(answer.text, answer.reasoning, answer.calls)
        elif answer.text:
            # An error in the middle: what came is worth as much as after Ctrl-C.
            kept = self._session.answered(answer.text, answer.reasoning, ())
        else:
            self._session.retract()
        for call in answer.calls:
            self._screen.note(f"calls {call.name} {call.arguments}")
        if answer.is_interrupted:
            self._screen.note("interrupted" if kept else "interrupted; the message was taken back")
        elif answer.error is not None:
            error = answer.error
            said = describe(error, of_generate=None) if isinstance(error, errors.TandemError) else str(error)
            self._screen.note(f"error: {said}" if kept else f"error: {said}; the message was taken back")
        elif not kept:
            self._screen.note("the answer is empty; the message was taken back")
        if answer.figures:
            self._screen.note(answer.figures)

    async def _carry_out(self, command: str, argument: str) -> bool:
        session, note = self._session, self._screen.note
        match command:
            case "/quit":
                return False
            case "/help":
                self._screen.table(help_lines())
            case "/clear":
                session.clear()
                note("the conversation is forgotten")
            case "/system":
                self._set_system(argument)
            case "/set":
                self._set(argument)
            case "/regen":
                if session.reopen():
                    await self._answer()
                else:
                    note("there is no answer yet")
            case "/tokens":
                await self._count_tokens()
            case "/save":
                path = Path(argument).expanduser()
                try:
                    session.save(path, overwrite=path in self._own_files)
                except FileExistsError:
                    raise ValueError(f"{path} exists, and this conversation was not loaded from it") from None
                self._own_files.add(path)
                note(f"{counted(session.num_turns, 'message')} written to {path}")
            case _:
                self._load(Path(argument).expanduser())
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            self._screen.note(self._session.system or "there is no message of the system")
            return
        self._session.system = None if text == "-" else text
        self._session.clear()
        self._screen.note("the conversation begins again")

    def _set(self, argument: str) -> None:
        settings = self._session.settings
        if argument:
            name, _, text = argument.partition(" ")
            value = parse_setting(name, text.strip())
            if value is None:
                settings.pop(name, None)
            else:
                settings[name] = value
        shown = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "tools")
        self._screen.note(shown or "every setting has its default")

    async def _count_tokens(self) -> None:
        session = self._session
        if not session.messages:
            self._screen.note("the conversation is empty")
            return
        keys = ("tools", "template_args")
        options: Mapping[str, Any] = {key: session.settings[key] for key in keys if key in session.settings}
        # The next message needs no more than its own tokens besides these.
        rendered = await self._client.render_chat(session.messages, timeout=_TIMEOUT_SECONDS, **options)
        number, limit = len(rendered.token_ids), self._model.max_length
        self._screen.note(f"{counted(session.num_turns, 'message')}, {number:,} of {counted(limit, 'token')}")

    def _load(self, path: Path) -> None:
        if self._session.load(path) is not None:
            raise ValueError(f"{path} is not a saved conversation")
        self._own_files.add(path)
        self._screen.note(f"{counted(self._session.num_turns, 'message')} read from {path}")


async def converse(client: AsyncClient, session: Session, first: str, *, with_history: bool) -> None:
    """Talks on the terminal of this process until the person leaves. `first`: a message that is sent at once.

    Raises TandemError if the service cannot be reached at the start, or serves no chats.
    """
    async with client:
        model = await client.model_info()
        check(model)
        path = history_path(os.environ) if with_history else None
        # If the answers go into a file, the prompt goes to the terminal.
        prompt = new_prompt(path, None if sys.stdout.isatty() else create_output(stdout=sys.stderr))
        screen = new_screen(Console(highlight=False, markup=False, emoji=False))
        with without_echo():
            await Loop(client, session, screen, prompt, model).run(first)
