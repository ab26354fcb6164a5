"""Reads the settings of several programs without starting them, for the program that starts them.

Owns the form of the question and of the answer: JSON objects by the name of a program, each in a line. The question has
its flags, the answer `settings`, `problems` (a line for each that is refused), or `says`, what --help or --version
prints. The variables and files are those that the programs would read. `answer` runs in a fork of the program that
asks, which must not import the other programs itself.
"""

import contextlib
import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from tandem_contract.settings import Program, SettingError


def answer(modules: Mapping[str, str], stream: TextIO) -> None:
    """Answers each question of the stream, to its end. The modules have the `PROGRAM` of each name."""
    # Before the first question comes.
    programs = {name: cast(Program[Any], importlib.import_module(each).PROGRAM) for name, each in modules.items()}
    while question := stream.readline():
        asked: dict[str, list[str]] = json.loads(question)
        found = {name: _read(programs[name], flags, os.environ) for name, flags in asked.items()}
        stream.write(f"{json.dumps(found)}\n")
        stream.flush()


def _read(program: Program[Any], flags: Sequence[str], environ: Mapping[str, str]) -> dict[str, object]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return {"settings": program.read(flags, environ).model_dump(mode="json", by_alias=True)}
    except SettingError as error:
        return {"problems": str(error).splitlines()}
    except SystemExit:
        return {"says": said.getvalue()}
