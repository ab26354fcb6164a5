"""`tandem simulate --memory …`: compares four layouts of the KV cache. Owns the options and what is printed."""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from scheduler_svc.simulator.memory.layouts import LAYOUTS
from scheduler_svc.simulator.memory.run import Run, count_that_fit, figures, size
from scheduler_svc.simulator.memory.sequences import Settings, draw
from tandem_contract.settings import Program, file, one_of

_DESCRIPTION = """\
Runs the same sequences through four layouts of the KV cache in the same memory. --png draws the memory of each layout
over time."""


class Options(Settings):
    """Every option of the comparison."""

    memory: Annotated[str, one_of([*LAYOUTS, "all"])] = Field(
        "all", title="LAYOUT", description=f"memory layout: {', '.join(LAYOUTS)} or all"
    )
    png: Path | None = file("draw the memory of each layout over time")


def run(program: str, arguments: Sequence[str]) -> int:
    """Returns the exit code, 1 if the picture cannot be drawn or written. Raises SettingError."""
    groups = {"output": ["memory", "png"], "sequences and layouts": Settings.model_fields}
    reader = Program(command=program, model=Options, description=_DESCRIPTION, groups=groups)
    options = reader.read(arguments, {})
    picture = None
    if options.png is not None:
        # Checked before the run, which may be long.
        if not options.png.parent.is_dir():
            return _fail(f"--png {options.png}: there is no folder {options.png.parent}")
        try:
            from scheduler_svc.simulator.memory import picture
        except ModuleNotFoundError as error:
            # This program is part of a checkout, never of the wheel.
            return _fail(f"{error.name} is missing: make install")
    clients, arrivals = draw(options)
    names = list(LAYOUTS) if options.memory == "all" else [options.memory]
    runs = [Run(LAYOUTS[name](options), clients, arrivals).to_end() for name in names]
    fits = [count_that_fit(clients, LAYOUTS[name](options)) for name in names]
    columns = [figures(each, count, options.token_bytes) for each, count in zip(runs, fits, strict=True)]
    rows = [["memory layout", *names], *([label, *(column[label] for column in columns)] for label in columns[0])]
    print(
        "\n".join(
            [*_heading(options), "", *(f"{row[0]:36}" + "".join(f"{cell:>23}" for cell in row[1:]) for row in rows)]
        )
    )
    if picture is not None and options.png is not None:
        try:
            picture.draw(options.png, _heading(options), runs)
        except OSError as error:
            # An error of write() carries no file name.
            return _fail(f"{error.filename or options.png}: {error.strerror}")
        print(options.png)
    return 0


def _heading(options: Options) -> list[str]:
    """Returns what was asked for, as lines that a page is wide enough for."""
    asked = options.model_dump(include=set(Settings.model_fields))
    memory = f"{size(options.memory_tokens * options.token_bytes)} of K/V, {size(options.token_bytes)} per token"
    return textwrap.wrap(f"{memory}; {', '.join(f'{name} {value}' for name, value in asked.items())}", 120)


def _fail(words: str) -> int:
    print(f"error: {words}", file=sys.stderr)
    return 1
