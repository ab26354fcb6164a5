"""Flags that several commands share, the panels of the help, and the declaration of a command's flags as a table."""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer

from tandem_client.cli.flag_names import KEYWORDS
from tandem_client.connection import DEFAULT_ADDRESS

PROMPT, CHAT, CONSTRAINT, SAMPLING, STOPPING, OUTPUT, CACHE, CONNECTION = (
    "Prompt", "Chat", "Constraint", "Sampling", "Stopping", "Output", "Cache", "Connection",
)  # fmt: skip


_Command = TypeVar("_Command", bound=Callable[..., None])


def option(panel: str, usage: str, description: str, **settings: Any) -> Any:
    """Declares a flag. `usage` has its names and, if the flag takes a value, the metavar: `--max-new-tokens -n N`."""
    names = usage.split()
    metavar = None if names[-1].startswith("-") else names.pop()
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=description, **settings)


def parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Declares one parameter of a command, for `takes`."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag(panel: str, kind: Any, usage: str, description: str) -> Parameter:
    """Declares a flag with the default None.

    The parameter has the name of the keyword that the flag sets; a flag that sets no keyword gives its own name.
    """
    flag_name = usage.split()[0].partition("/")[0]
    name = KEYWORDS.get(flag_name) or flag_name.removeprefix("--").replace("-", "_")
    return parameter(name, Annotated[kind | None, option(panel, usage, description)])


def takes(parameters: Sequence[Parameter]) -> Callable[[_Command], _Command]:
    """Declares the parameters of a command in a table; its function may collect them as `**options`."""

    def declared(command: _Command) -> _Command:
        command.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return declared


def _with_port(address: str) -> str:
    # Without a port, gRPC would use 443 and report a refused connection.
    if ":" not in address:
        raise typer.BadParameter(f"is {address[:40]!r}; it must be HOST:PORT, like {DEFAULT_ADDRESS}")
    return address


Address = Annotated[
    str,
    option(
        CONNECTION, "--address -a HOST:PORT", "Address of the service.", envvar="TANDEM_ADDRESS", callback=_with_port
    ),
]
Json = Annotated[bool, option(OUTPUT, "--json", "Print JSON, for programs.")]
Model = Annotated[str | None, option(PROMPT, "--model NAME", "Fail unless this model is served.")]
Timeout = Annotated[
    float | None, option(CONNECTION, "--timeout SECONDS", "Give up after this time; at least 0.", min=0)
]
AddSpecialTokens = Annotated[
    bool | None,
    option(
        PROMPT,
        "--add-special-tokens/--no-add-special-tokens",
        "Add the special tokens with which the tokenizer begins a text (default).",
    ),
]
SkipSpecialTokens = Annotated[
    bool | None,
    option(OUTPUT, "--skip-special-tokens/--no-skip-special-tokens", "Leave special tokens out of the text (default)."),
]
