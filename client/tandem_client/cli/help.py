"""Draws the help of a command: usage, description, panels of arguments and flags, examples.

Owns the layout: two columns, names and descriptions, or one below the other on a narrow terminal. Reads only what the
command declares: panel, metavar, help, default and environment variable of each parameter.
"""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tandem_client.services.programs import missing_programs

# Longer lines are hard to read.
_MAX_WIDTH = 100
# On a narrower terminal a description is printed below its name.
_MIN_TWO_COLUMNS = 64
_INDENT = 4
_DEFAULT_PANEL = "Options"
_COMMANDS_PANEL = "Commands"
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_NAME, _METAVAR, _QUIET = "bold cyan", "yellow", "dim"


def render(command: Any, context: Any) -> str:
    """Returns the help as text, with colours if standard output is a terminal that shows them."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, _MAX_WIDTH)
    with console.capture() as captured:
        console.print(Text(f"Usage: {' '.join([context.command_path, *_usage(command, context)])}", style="bold"))
        console.print()
        console.print(_described(" ".join((command.help or "").split())))
        console.print()
        for title, rows in _panels(command, context).items():
            console.print(_panel(title, rows, console.width))
        for line in (command.epilog or "").splitlines():
            # Examples are indented. They are not wrapped, so that they can be pasted.
            console.print(_described(line), soft_wrap=line.startswith(" "))
    return captured.get().rstrip()


def flag_of(parameter: Any) -> str:
    """Returns the name on the command line: the first long flag, or the metavar of an argument."""
    long = [name for name in parameter.opts if name.startswith("--")]
    return long[0] if long else parameter.metavar or parameter.name.upper()


def _usage(command: Any, context: Any) -> Iterable[str]:
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            name = f"{flag_of(parameter)}{'...' if parameter.nargs == -1 else ''}"
            yield name if parameter.required else f"[{name}]"
    yield "COMMAND ..." if hasattr(command, "commands") else "[OPTIONS]"


def _panels(command: Any, context: Any) -> dict[str, list[tuple[Text, Text]]]:
    """Returns the rows of each panel, in the order in which the command declares them."""
    panels: dict[str, list[tuple[Text, Text]]] = {}
    for sub_command in getattr(command, "commands", {}).values():
        if not sub_command.hidden and not missing_programs(getattr(sub_command, "programs", ())):
            row = Text(sub_command.name, style=_NAME), _described(sub_command.short_help or sub_command.help or "")
            panels.setdefault(sub_command.rich_help_panel or _COMMANDS_PANEL, []).append(row)
    for parameter in command.get_params(context):
        panel = getattr(parameter, "rich_help_panel", None)
        # Every command has --help; only the list of commands shows it.
        if parameter.name == "help" and context.parent is not None:
            continue
        panels.setdefault(panel or _DEFAULT_PANEL, []).append((_name(parameter), _description(parameter)))
    return panels


def _name(parameter: Any) -> Text:
    if parameter.param_type_name == "argument":
        return Text(flag_of(parameter), style=_METAVAR)
    names = sorted(parameter.opts, key=len, reverse=True)
    if parameter.secondary_opts:
        # A switch with both forms: --want-text and --no-want-text.
        names = [f"--[no-]{names[0].removeprefix('--')}"]
    text = Text(", ".join(names), style=_NAME)
    if not parameter.is_flag:
        choices = getattr(getattr(parameter, "type_descriptor", None), "choices", None) or ("TEXT",)
        text.append(f" {parameter.metavar or '|'.join(choices)}", style=_METAVAR)
    return text


def _description(parameter: Any) -> Text:
    text = _described(getattr(parameter, "help", None) or "")
    extra: list[str] = []
    default = parameter.default
    if not getattr(parameter, "is_flag", False) and default not in (None, ""):
        extra.append(f"default {default:g}" if isinstance(default, int | float) else f"default {default}")
    if getattr(parameter, "envvar", None):
        extra.append(f"or environment variable {parameter.envvar}")
    return text.append(f" [{', '.join(extra)}]", style=_QUIET) if extra else text


def _described(text: str) -> Text:
    described = Text(text)
    described.highlight_regex(_FLAG, _NAME)
    return described


def _panel(title: str, rows: list[tuple[Text, Text]], width: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    if width < _MIN_TWO_COLUMNS:
        table.add_column()
        for name, description in rows:
            table.add_row(name)
            table.add_row(Padding(description, (0, 0, 0, _INDENT)))
    else:
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        for name, description in rows:
            table.add_row(name, description)
    return Panel(table, title=title, title_align="left", border_style=_QUIET)
