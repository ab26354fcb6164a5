"""`tandem plot` plots the file that the scheduler's --steps writes; `tandem simulate` and `tandem keys` run programs.

A program of a checkout replaces this process and gets its arguments, its signals and its exit code.
`tandem_client.plot` reads the file and draws it.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem_client.cli.flags import OUTPUT, option
from tandem_client.cli.reporting import Exit, fail, require_programs

PROGRAM = "scheduler_svc"


def plot(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Step log, as the service's --steps FILE writes it."),
    ],
    output: Annotated[
        Path | None, option(OUTPUT, "--output -o FILE", "The PNG to write. Default: the log's name with .png.")
    ] = None,
    by_time: Annotated[bool, option(OUTPUT, "--by-time", "Use time, not step number, as the x axis.")] = False,
    width: Annotated[
        int,
        option(OUTPUT, "--width PIXELS", "Width of the picture, 600 to 8000; the height follows.", min=600, max=8000),
    ] = 1600,
) -> None:
    """Plot a step log: running and waiting requests, step types and times."""
    try:
        from tandem_client.plot.chart import draw
        from tandem_client.plot.data import StepsFileError, read_steps, summarize, table
    except ModuleNotFoundError as error:
        from tandem_contract.version import how_to_install

        raise fail(
            f"tandem plot needs {error.name}, which is not installed; install it with: {how_to_install('plot')}"
        ) from None
    target = output or file.parent / f"{file.stem}.png"
    try:
        if target.exists() and file.exists() and target.samefile(file):
            raise fail(f"--output {target} is the step log itself; name another file", Exit.USAGE)
        log = read_steps(file)
        summary = summarize(log)
        target.write_bytes(draw(log, summary, width=width, by_time=by_time))
    except StepsFileError as error:
        raise fail(str(error), Exit.USAGE) from None
    except OSError as error:
        # An error of a write to an open file does not name the file.
        raise fail(f"{error.filename or target}: {error.strerror}") from None
    for line in table(summary):
        print(line)
    print(target)


def simulate(context: typer.Context) -> None:
    """Predict speed and latency for a machine, model and workload, with the real scheduler on virtual time."""
    require_programs([PROGRAM], "tandem simulate")
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"{PROGRAM}.simulator", *context.args])


def keys(context: typer.Context) -> None:
    """Make the keys with which workers on other hosts join."""
    require_programs([PROGRAM], "tandem keys")
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"{PROGRAM}.remote", *context.args])
