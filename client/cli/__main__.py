"""The `tandem` command: its subcommands, put together."""

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from client.cli import generate as generating
from client.cli import serve as serving
from client.cli import simulate as simulating
from client.cli.generate import generate
from client.cli.plot import plot
from client.cli.program import TandemCommand, TandemGroup
from client.cli.queries import abort, detokenize, flush, tokenize
from client.cli.reporting import Exit
from client.cli.serve import serve
from client.cli.simulate import simulate
from client.cli.status import health, info, load
from client.processes import missing_programs
from client.version import version

_HELP = {"help_option_names": ["-h", "--help"]}
_TEXT, _SERVICE, _LOCAL = "Generate", "Look at a service", "Run and analyse"
_END = """\
Examples:
  tandem health --wait 60
  tandem generate "Return the" -n 32
  tandem generate --help

Exit codes: 0 done, 1 failed, 2 the request is wrong, 3 not available or full, 4 timed out, 130 interrupted,
141 the reader of the output has closed it."""

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
        print(f"tandem {version()}")
        raise typer.Exit


@app.callback()
def tandem(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Talk to a Tandem service: generate text, and look at the service itself."""
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")
        raise typer.Exit(Exit.USAGE)


def _add(
    command: Callable[..., Any], panel: str, *, examples: str | None = None, programs: tuple[str, ...] = ()
) -> None:
    """A command of programs that are not installed stays callable, to say what is missing, but is not listed."""
    app.command(
        cls=TandemCommand,
        context_settings=_HELP,
        rich_help_panel=panel,
        epilog=examples,
        hidden=bool(missing_programs(programs)),
    )(command)


_add(generate, _TEXT, examples=generating.EXAMPLES)
_add(tokenize, _TEXT)
_add(detokenize, _TEXT)
_add(abort, _TEXT)
_add(health, _SERVICE)
_add(load, _SERVICE)
_add(info, _SERVICE)
_add(flush, _SERVICE)
_add(serve, _LOCAL, programs=serving.PROGRAMS)
# Its arguments are the simulator's to read, --help too.
app.command(
    cls=TandemCommand,
    context_settings={"help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel=_LOCAL,
    hidden=bool(missing_programs([simulating.PROGRAM])),
)(simulate)
_add(plot, _LOCAL)


def main() -> None:
    """Runs the command that the arguments name."""
    # gRPC's library would log to stderr, between the lines for people, that a server closed a connection.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    app()


if __name__ == "__main__":
    main()
