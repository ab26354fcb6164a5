"""The commands of `tandem` as a table, each imported when it runs: the list of commands and --version wait for none.

Owns what is known of a command without its module, and what is said of a word that is no command. A test compares the
summaries with the functions.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

_COMMANDS = "tandem_client.cli.commands"
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# Arguments that a program reads, --help too.
_PASS_ON: dict[str, Any] = {"help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True}

_START = "tandem serve starts a service"
_LOAD = "tandem load shows requests, pages and workers, tandem health whether it serves"
_REQUESTS = "tandem requests lists the requests that wait or run, tandem load shows the load"
_INFO = "tandem info shows the served model"
_PULL = "tandem serve takes a folder or a hub name as its model"
_STOP = "Ctrl-C ends tandem serve, and tandem drain lets a service end its requests first"
_LOG = "tandem serve -v prints the log of its programs, or has it in serve.log of the runtime folder"
_BENCH = "tandem simulate predicts speeds, and tandem plot draws a step log"
# What people type who know ollama, docker, vllm or systemd.
_WORDS = {
    "run": f"{_START}, and tandem chat or tandem generate asks it",
    **dict.fromkeys(("start", "up", "daemon", "api_server"), _START),
    **dict.fromkeys(("status", "stats"), _LOAD),
    **dict.fromkeys(("ps", "top", "queue", "jobs"), _REQUESTS),
    **dict.fromkeys(("models", "model", "list", "ls", "show", "inspect"), _INFO),
    **dict.fromkeys(("pull", "download", "create", "fetch"), _PULL),
    **dict.fromkeys(("stop", "down", "shutdown", "quit"), _STOP),
    **dict.fromkeys(("restart", "reload"), f"{_STOP}; {_START}"),
    **dict.fromkeys(
        ("logs", "log", "journalctl"),
        _LOG,
    ),
    **dict.fromkeys(("cancel", "kill", "rm"), "tandem abort ends requests"),
    **dict.fromkeys(("complete", "completion", "prompt", "ask"), "tandem generate continues a text"),
    **dict.fromkeys(("encode", "decode"), "tandem tokenize prints token ids, tandem detokenize their text"),
    **dict.fromkeys(("login", "auth"), "tandem token new makes a token; --token-file or TANDEM_TOKEN gives it"),
    **dict.fromkeys(("bench", "benchmark"), _BENCH),
    "version": "tandem --version prints it",
    "help": "tandem --help lists the commands",
}


def no_such_command(word: str, commands: Iterable[str]) -> str:
    """Returns what is said of a word that is none of the commands: what does that, or the nearest one."""
    said = f"there is no command {word[:40]!r}"
    if (known := _WORDS.get(word.lower())) is not None:
        return f"{said}; {known}"
    near = difflib.get_close_matches(word.lower(), commands, n=1)
    return f"{said}; did you mean tandem {near[0]}?" if near else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of a command before its module is imported."""

    module: str
    summary: str
    # The function, or a Typer of several; by default the command's own name.
    attribute: str = ""
    # Whether it starts programs of a checkout; the help lists it only where these are installed.
    of_checkout: bool = False
    passes_on: bool = False


class Later(TyperCommand):
    """A command whose module is imported when the command is called, or asked for its help."""

    def __init__(self, name: str, panel: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary, rich_help_panel=panel)
        self.entry = entry

    @cached_property
    def loaded(self) -> Any:
        """The command itself."""
        module = import_module(f"{_COMMANDS}.{self.entry.module}")
        target: Any = getattr(module, self.entry.attribute or str(self.name).replace("-", "_"))
        if isinstance(target, typer.Typer):
            return get_command(target)
        made = typer.Typer(add_completion=False)
        settings = _PASS_ON if self.entry.passes_on else HELP
        epilog = getattr(module, "EXAMPLES", None)
        made.command(self.name, help=self.entry.summary, epilog=epilog, context_settings=settings)(target)
        return get_command(made)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself."""
        return self.loaded.make_context(info_name, args, parent=parent, **extra)
