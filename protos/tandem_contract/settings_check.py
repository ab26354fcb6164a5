"""Reads the settings of several programs without starting them, for the program that starts them.

Owns the form of the question and of the answer: JSON objects by the name of a program. The question has its flags, the
answer `settings`, `problems` (a line for each that is refused), or `says`, what --help or --version prints. The
variables and files are those that the programs would read. Runs in a process of its own (`main`), because the one that
asks must not import the programs, and pydantic takes longer to import than the rest.
"""

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tandem_contract.settings import Program, SettingError


def main() -> None:
    """Answers the question on stdin. Each argument is NAME=MODULE, the module with the `PROGRAM` of this name."""
    # Before the question comes.
    programs = {
        name: cast(Program[Any], importlib.import_module(module).PROGRAM)
        for name, _, module in (argument.partition("=") for argument in sys.argv[1:])
    }
    asked: dict[str, list[str]] = json.load(sys.stdin)
    print(json.dumps({name: _read(programs[name], flags, os.environ) for name, flags in asked.items()}))


def _read(program: Program[Any], flags: Sequence[str], environ: Mapping[str, str]) -> dict[str, object]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return {"settings": program.read(flags, environ).model_dump(mode="json", by_alias=True)}
    except SettingError as error:
        return {"problems": str(error).splitlines()}
    except SystemExit:
        return {"says": said.getvalue()}
