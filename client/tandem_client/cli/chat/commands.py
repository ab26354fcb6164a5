"""The commands of a conversation, lines that begin with a slash: their names, their help, and how a line is read.

Does no I/O; the loop carries them out.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from tandem_client.cli.chat.settings import SETTINGS

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
