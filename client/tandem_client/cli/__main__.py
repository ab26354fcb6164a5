"""The `tandem` command: its subcommands, put together."""

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tandem_client.cli.commands import queries
from tandem_client.cli.commands.chat import EXAMPLES as CHAT_EXAMPLES
from tandem_client.cli.commands.chat import chat
from tandem_client.cli.commands.generate import EXAMPLES, generate
from tandem_client.cli.commands.local import keys, plot, simulate
from tandem_client.cli.commands.serve import serve
from tandem_client.cli.commands.token import new
from tandem_client.cli.reporting import CheckoutCommand, Exit, TandemGroup

_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_TEXT, _SERVICE, _LOCAL = "Generate", "Look at a service", "Run and analyse"
_END = """
Examples:
  tandem health --wait 60
  tandem generate "Return the" -n 32
  tandem generate --help

Exit codes: 0 done, 1 failed, 2 the request is wrong, 3 not available or full, 4 timed out, 130 interrupted, \
141 the output was closed by its reader."""

app = typer.Typer(
    name="tandem",
    cls=TandemGroup,
    context_settings=_HELP,
    invoke_without_command=True,
    epilog=_END,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        # It takes 10 ms, which other commands need not.
        from tandem_contract.version import version

        print(f"tandem {version()}")
        raise typer.Exit


@app.callback()
def tandem(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Talk to a Tandem service: chat, generate text, and look at the service itself."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(Exit.USAGE)


def _add(
    command: Callable[..., Any],
    panel: str,
    cls: type[TyperCommand] = TyperCommand,
    *,
    epilog: str | None = None,
    context_settings: dict[str, Any] = _HELP,
) -> None:
    app.command(cls=cls, rich_help_panel=panel, epilog=epilog, context_settings=context_settings)(command)


_add(chat, _TEXT, epilog=CHAT_EXAMPLES)
_add(generate, _TEXT, epilog=EXAMPLES)
for each in (queries.tokenize, queries.detokenize, queries.abort):
    _add(each, _TEXT)
for each in (
    queries.health,
    queries.load,
    queries.requests,
    queries.info,
    queries.flush,
    queries.quarantine,
    queries.drain,
    queries.update_weights,
):
    _add(each, _SERVICE)
_add(serve, _LOCAL, CheckoutCommand)
# Their arguments are the service's to read, --help too.
_PASS_ON: dict[str, Any] = {"help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True}
_add(simulate, _LOCAL, CheckoutCommand, context_settings=_PASS_ON)
_add(keys, _LOCAL, CheckoutCommand, context_settings=_PASS_ON)
_add(plot, _LOCAL)
_tokens = typer.Typer(cls=TandemGroup, context_settings=_HELP, invoke_without_command=True, add_completion=False)
_tokens.command(rich_help_panel=_LOCAL, context_settings=_HELP)(new)


@_tokens.callback()
def _token(context: typer.Context) -> None:
    """Make tokens for a service."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(Exit.USAGE)


app.add_typer(_tokens, name="token", rich_help_panel=_LOCAL)


def main() -> None:
    """Runs the command that the arguments name."""
    # gRPC's library would log to stderr, between the lines for people, that a server closed a connection.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    app()


if __name__ == "__main__":
    main()
