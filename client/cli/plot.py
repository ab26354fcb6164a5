"""`tandem plot`: a picture of what each step did, from the file that the scheduler's --steps wrote."""

from pathlib import Path
from typing import Annotated

import typer

from client.cli.reporting import Exit, fail
from client.plot_data import StepsFileError, read_steps
from client.plot_summary import summarize, table


def plot(
    file: Annotated[Path, typer.Argument(help="What the scheduler service wrote with --steps FILE.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The PNG; default: FILE with .png.")] = None,
    by_time: Annotated[bool, typer.Option("--by-time", help="Seconds to the right, not step numbers.")] = False,
    width: Annotated[int, typer.Option(min=600, max=8000, help="Pixels; the height follows.")] = 1600,
) -> None:
    """Draw who ran and waited, which kind each step was, and how long each kind took."""
    try:
        from client.plot_chart import draw
    except ModuleNotFoundError as error:
        raise fail(f"{error.name} is missing: pip install 'tandem[plot]'", Exit.ERROR) from None
    target = output or file.parent / f"{file.stem}.png"
    try:
        if target.exists() and file.exists() and target.samefile(file):
            raise fail(f"--output {target} is the file of steps itself; name another", Exit.USAGE)
        log = read_steps(file)
        summary = summarize(log)
        target.write_bytes(draw(log, summary, width=width, by_time=by_time))
    except StepsFileError as error:
        raise fail(str(error), Exit.USAGE) from None
    except OSError as error:
        # Only a write to a file that is open names none.
        raise fail(f"{error.filename or target}: {error.strerror}", Exit.ERROR) from None
    for line in table(summary):
        print(line)
    if log.left_out:
        print("the last line is cut short and left out: the service still writes, or was killed")
    print(target)
