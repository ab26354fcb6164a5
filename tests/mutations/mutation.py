"""A mutation: one fault that is put into the source, and what should detect it. Reads them from the files of `faults`.

A file of `faults` holds one group. A fault belongs to the one module below the folder `root` that has the definition
and the code that the fault changes, so it follows a module that moves. Each table of the file is a fault:

    [its-name]
    breaks = "what it breaks, in words"
    in = "Class.method"             # the definition
    old = "a < b"                   # code that occurs once in it; `_` is any expression
    new = "a <= b"                  # what takes its place
    also = [{in = …, old = …, new = …}]    # further edits, in the same module
    tests = ["tests/…/test_x.py::test_y"]  # they alone must detect it; without them, the simulation or the core's tests
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutations.edits import Edit, MisplacedEdit, defines, edited

ROOT = Path(__file__).resolve().parents[2]
_FILES = sorted((Path(__file__).parent / "faults").glob("*.toml"))
GROUPS = tuple(file.stem for file in _FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A fault; see the module's docstring."""

    name: str
    group: str
    root: str
    breaks: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()

    def applied(self) -> tuple[str, str]:
        """Returns the changed module: its path from the checkout's folder, and its text. Raises MisplacedEdit."""
        fitting: list[tuple[str, str]] = []
        errors: list[str] = []
        for path, text in _texts(self.root).items():
            if not defines(text, self.edits[0].definition):
                continue
            try:
                fitting.append((str(path.relative_to(ROOT)), edited(text, self.edits)))
            except MisplacedEdit as error:
                errors.append(f"{path.relative_to(ROOT)}: {error}")
        if len(fitting) == 1:
            return fitting[0]
        paths = ", ".join(path for path, _ in fitting)
        reason = f"it fits {paths}" if fitting else "; ".join(errors) or f"nothing defines {self.edits[0].definition}"
        raise MisplacedEdit(f"mutation {self.name} of {self.root}: {reason}")


def every() -> tuple[Mutation, ...]:
    """Reads all groups."""
    return tuple(mutation for file in _FILES for mutation in _group(file))


def _group(file: Path) -> list[Mutation]:
    faults = tomllib.loads(file.read_text())
    root = faults.pop("root")
    return [
        Mutation(
            name=name,
            group=file.stem,
            root=root,
            breaks=fault["breaks"],
            edits=tuple(
                Edit(definition=edit["in"], old=edit["old"], new=edit["new"])
                for edit in (fault, *fault.get("also", ()))
            ),
            tests=tuple(fault.get("tests", ())),
        )
        for name, fault in faults.items()
    ]


@cache
def _texts(root: str) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / root).rglob("*.py"))}
