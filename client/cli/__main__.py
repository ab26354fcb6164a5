"""The `tandem` command: its subcommands, put together."""

import os
import sys

import typer

from client.cli.generate import generate
from client.cli.plot import plot
from client.cli.queries import abort, detokenize, flush, health, info, load, tokenize
from client.cli.reporting import Exit
from client.cli.serve import serve
from client.cli.simulate import simulate

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="tandem",
    help="Talk to a Tandem service. Exit codes: 1 failed, 2 the request is wrong, 3 not available, 4 timed out, "
    "130 interrupted.",
    context_settings=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, tokenize, detokenize, abort, flush, info, load, health, plot, serve):
    app.command(context_settings=_HELP)(command)
# Whatever is said behind it is the simulator's to read, --help too.
app.command(
    context_settings={"help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True},
)(simulate)


def main() -> None:
    """Runs the command that the arguments name."""
    # Else gRPC's library logs to stderr, among what is for people, that a server said goodbye.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app()
    except BrokenPipeError:
        # The reader left. What is buffered has nowhere to go, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.ERROR)


if __name__ == "__main__":
    main()
