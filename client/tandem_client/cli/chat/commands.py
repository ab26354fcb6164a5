"""The commands of a conversation and the settings of `/set`: their names, their help, and how a line is read.

Commands are lines that begin with a slash. Does no I/O; the loop carries them out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


def _json_object(text: str) -> dict[str, Any]:
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value  # pyright: ignore[reportUnknownVariableType]


# Keywords of `generate`: how a value is read, and what it must be.
SETTINGS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "top_k": (int, "a whole number"),
    "min_p": (float, "a number"),
    "seed": (int, "a whole number"),
    "max_new_tokens": (int, "a whole number"),
    "presence_penalty": (float, "a number"),
    "frequency_penalty": (float, "a number"),
    "repetition_penalty": (float, "a number"),
    "template_args": (_json_object, 'a JSON object, such as {"enable_thinking": false}'),
}
# Name: argument, description.
COMMANDS = {
    "/help": ("", "this list"),
    "/clear": ("", "forget the conversation; the system's message and the settings stay"),
    "/system": ("[TEXT]", "set the system's message and begin anew; without TEXT show it; - removes it"),
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
        raise ValueError(f"{name[:40]!r} is no setting; there are {', '.join(SETTINGS)}")
    read, kind = SETTINGS[name]
    if not text:
        return None
    try:
        return read(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {text[:40]!r}; it must be {kind}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with its argument; empty without one."""

    name: str
    argument: str = ""


def parse(text: str) -> Command | str:
    """Returns the command, or the message to send. Raises ValueError for a command that does not exist.

    A message between triple quotes loses them, and begins with a slash if it likes to.
    """
    stripped = text.strip()
    if stripped.startswith(_QUOTES):
        return stripped.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    if not text.startswith("/"):
        return stripped
    name, _, argument = stripped.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands."
        raise ValueError(f"{name[:40]} is no command; {hint} A blank before the slash makes it a message.")
    usage, _ = COMMANDS[name]
    if argument and not usage:
        raise ValueError(f"{name} takes no argument")
    if not argument.strip() and usage and not usage.startswith("["):
        raise ValueError(f"{name} needs {usage}")
    return Command(name=name, argument=argument.strip())


def is_complete(text: str) -> bool:
    """Whether Enter sends the text: not within triple quotes."""
    stripped = text.strip()
    return not stripped.startswith(_QUOTES) or (len(stripped) >= 2 * len(_QUOTES) and stripped.endswith(_QUOTES))


def help_lines() -> list[tuple[str, str]]:
    """The commands and the keys, each with its description."""
    return [*((f"{name} {usage}".strip(), what) for name, (usage, what) in COMMANDS.items()), *_KEYS]
