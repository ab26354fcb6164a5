"""Flags that several commands share, and the panels of the help."""

from typing import Annotated, Any

import typer

from tandem_client.connection import DEFAULT_ADDRESS

PROMPT, SAMPLING, STOPPING, OUTPUT, CACHE, CONNECTION = (
    "Prompt", "Sampling", "Stopping", "Output", "Cache", "Connection",
)  # fmt: skip


def option(panel: str, metavar: str, description: str, *names: str, **settings: Any) -> Any:
    """Declares a flag with a value, which the help calls `metavar`."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=description, **settings)


def switch(panel: str, description: str, *names: str) -> Any:
    """Declares a flag without a value."""
    return typer.Option(*names, rich_help_panel=panel, help=description)


def _with_port(address: str) -> str:
    # Without a port, gRPC would use 443 and report a refused connection.
    if ":" not in address:
        raise typer.BadParameter(f"is {address[:40]!r}; it must be HOST:PORT, like {DEFAULT_ADDRESS}")
    return address


Address = Annotated[
    str,
    option(
        CONNECTION,
        "HOST:PORT",
        "Address of the service.",
        "--address",
        "-a",
        envvar="TANDEM_ADDRESS",
        callback=_with_port,
    ),
]
Json = Annotated[bool, switch(OUTPUT, "Print JSON, for programs.", "--json")]
Model = Annotated[str | None, option(PROMPT, "NAME", "Fail unless this model is served.")]
Timeout = Annotated[float | None, option(CONNECTION, "SECONDS", "Give up after this time; at least 0.", min=0)]
SkipSpecialTokens = Annotated[
    bool | None,
    switch(OUTPUT, "Leave special tokens out of the text (default).", "--skip-special-tokens/--no-skip-special-tokens"),
]
