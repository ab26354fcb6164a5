"""The `tandem` command: its subcommands, put together."""

import os
from collections import UserDict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from tandem_client.cli.reporting import HELP, Exit, TandemGroup

_END = """
Examples:
  tandem health --wait 60
  tandem generate "Return the" -n 32
  tandem generate --help

Exit codes: 0 done, 1 failed, 2 the request is wrong, 3 not available or full, 4 timed out, 130 interrupted, \
141 the output was closed by its reader."""

# Heading in the help, command, and its module in `commands`, in the order of the help.
_PANELS = {
    "Generate": {
        "chat": "chat",
        "generate": "generate",
        **dict.fromkeys(("tokenize", "detokenize", "abort"), "queries"),
    },
    "Look at a service": dict.fromkeys(
        ("health", "load", "requests", "info", "flush", "quarantine", "drain", "update-weights"), "queries"
    ),
    "Run and analyse": {"serve": "serve", "simulate": "local", "keys": "local", "plot": "local", "token": "token"},
}
_PLACES = {name: (panel, module) for panel, modules in _PANELS.items() for name, module in modules.items()}
# They run programs of a checkout, and are listed only where these are installed.
_OF_CHECKOUT = ("serve", "simulate", "keys")
# The arguments of these, --help too, are read by the program.
_PASS_ON = ("simulate", "keys")
_ALL_ARGUMENTS: dict[str, Any] = {
    "help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True
}  # fmt: skip


class _Commands(UserDict[str, Any]):
    """The commands by name. Each is imported when it is asked for: --version and a wrong word wait for none."""

    def __getitem__(self, name: str) -> Any:
        panel, module_name = self.data[name]
        module = import_module(f"tandem_client.cli.commands.{module_name}")
        target: Any = getattr(module, name.replace("-", "_"))
        if not isinstance(target, typer.Typer):
            command, target = target, typer.Typer(add_completion=False)
            settings, epilog = _ALL_ARGUMENTS if name in _PASS_ON else HELP, getattr(module, "EXAMPLES", None)
            target.command(name, epilog=epilog, context_settings=settings)(command)
        made: Any = get_command(target)
        made.name, made.rich_help_panel = name, panel
        return made


class _Group(TandemGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands(_PLACES)

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the commands of installed programs; the others explain what is missing."""
        from tandem_client.services.programs import PROGRAMS, missing_programs

        unlisted = _OF_CHECKOUT if missing_programs(PROGRAMS) else ()
        return [name for name in _PLACES if name not in unlisted]


app = typer.Typer(
    name="tandem",
    cls=_Group,
    context_settings=HELP,
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


def main() -> None:
    # gRPC's library would log to stderr, between the lines for people; an error has all that these lines say.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()


if __name__ == "__main__":
    main()
