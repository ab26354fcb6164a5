"""The `tandem` command: its subcommands, put together."""

import os
from typing import Annotated, Any

import typer

from tandem_client.cli.later import HELP, Entry, Later
from tandem_client.cli.reporting import Exit, TandemGroup

_END = """
Examples:
  tandem health --wait 60
  tandem generate "Return the" -n 32
  tandem generate --help

Exit codes: 0 done, 1 failed, 2 the request is wrong, 3 not available or full, 4 timed out, 130 interrupted, \
141 the output was closed by its reader."""

# In the order of the help, below their headings.
_PANELS: dict[str, dict[str, Entry]] = {
    "Generate": {
        "chat": Entry(module="chat", summary="Talk with the model; with MESSAGE or piped input, print one answer."),
        "generate": Entry(module="generate", summary="Complete a text and print the output as it is generated."),
        "tokenize": Entry(module="queries", summary="Print the token ids of a text or of a chat."),
        "detokenize": Entry(module="queries", summary="Print the text of token ids."),
        "abort": Entry(
            module="queries", summary="Cancel running or waiting requests; exit code 1 if an id is unknown."
        ),
    },
    "Look at a service": {
        "health": Entry(
            module="queries",
            summary="Check whether the service computes a request that arrives now; exit code 3 if not.",
        ),
        "load": Entry(module="queries", summary="Show the current load: requests, pages, workers."),
        "requests": Entry(
            module="queries",
            summary="List the requests that wait or run, the oldest first, with the ids that abort takes.",
        ),
        "info": Entry(module="queries", summary="Show the served model, its limits and default settings."),
        "flush": Entry(module="queries", summary="Empty the prefix cache and print how many pages were freed."),
        "quarantine": Entry(
            module="queries",
            summary="List the requests that are refused because they killed their workers, or clear the list.",
        ),
        "drain": Entry(
            module="queries",
            summary=(
                "Let a worker, or the service, end its requests and leave; exit code 1 if it could not end in order."
            ),
        ),
        "update-weights": Entry(
            module="queries",
            summary="Let all workers load new weights of the same model; exit code 1 if not all of them have.",
        ),
    },
    "Run and analyse": {
        "serve": Entry(
            module="serve",
            summary="Run the scheduler service and a worker until Ctrl-C, and restart them when they die.",
            of_checkout=True,
        ),
        "simulate": Entry(
            module="local",
            summary="Predict speed and latency for a machine, model and workload, with the real scheduler on virtual"
            " time.",
            of_checkout=True,
            passes_on=True,
        ),
        "keys": Entry(
            module="local",
            summary="Make the keys with which workers on other hosts join.",
            of_checkout=True,
            passes_on=True,
        ),
        "plot": Entry(module="local", summary="Plot a step log: running and waiting requests, step types and times."),
        "token": Entry(module="token", attribute="tokens", summary="Make tokens for a service."),
    },
}


class _Group(TandemGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, entries in _PANELS.items():
            self.commands.update((name, Later(name, panel, entry)) for name, entry in entries.items())


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
    """Runs the command that the arguments name."""
    # gRPC's library would log to stderr, between the lines for people; an error has all that these lines tell.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()


if __name__ == "__main__":
    main()
