"""The recipes of "Changing it": what the page says of each, and its steps as data. Reads both.

A file of `steps` holds one recipe for a change of this code. Its tables are

    title = "A sampling parameter"          # as the page begins it
    [[step]]                                # a new file
    file = "gpu_worker/…/x.py"
    text = "…"
    [[step]]                                # or a change of a file, at an anchor that occurs once in it
    file = "…"
    after = "…"                             # the anchor; or `before`, or `instead` of it
    add = "…"
    [[notices]]                             # without the steps of these files the tests fail, by name
    without = ["…"]
    fail = ["tests/…/test_x.py::test_y"]
    [tests]                                 # with all steps they pass
    quick = ["…"]                           # in the suite
    named = ["…"]                           # those that the page names, too, in `make recipes`
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = "README.md"
_FILES = Path(__file__).with_name("steps")
# A recipe of the page: a bold title, and words with the names of files, up to the next one or the end of the list.
_RECIPE = re.compile(r"^- \*\*(?P<title>[^*]+)\*\*(?P<words>.*?)(?=^- |^$)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`([\w./-]+(?:\.\w+|/))`")


class Misplaced(Exception):
    """An anchor does not occur once in its file, or a new file exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One edit of a file. A new file has no anchor."""

    file: str
    anchor: str
    text: str

    def applied(self, before: str | None) -> str:
        """Returns the file's text after the step, from that before it, None without a file. Raises Misplaced."""
        if not self.anchor:
            if before is not None:
                raise Misplaced(f"{self.file} is to be made, and exists")
            return self.text
        if before is None:
            raise Misplaced(f"{self.file} does not exist")
        if (count := before.count(self.anchor)) != 1:
            raise Misplaced(f"{self.file} has {self.anchor!r} {count} times; a step needs it once")
        return before.replace(self.anchor, self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Tests that fail without the steps of some files."""

    without: tuple[str, ...]
    fail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe; see the module's docstring."""

    name: str
    title: str
    steps: tuple[Step, ...]
    notices: tuple[Notice, ...]
    quick: tuple[str, ...]
    named: tuple[str, ...]

    @cached_property
    def words(self) -> str:
        """What the page says."""
        found = {each["title"]: each["words"] for each in _RECIPE.finditer((ROOT / PAGE).read_text("utf-8"))}
        assert self.title in found, f"{PAGE} has no recipe {self.title!r}; it has {', '.join(found)}"
        return found[self.title]

    @property
    def places(self) -> dict[str, list[str]]:
        """The names of files and folders on the page, each with what of `edited` it means."""
        edited = self.edited
        return {
            name: [name] if name in edited else [each for each in edited if each.endswith(f"/{name}")]
            for name in _NAME.findall(self.words)
        }

    @property
    def edited(self) -> list[str]:
        """The files of the steps; the folder in place of a file that is made, with a slash at its end."""
        return sorted({step.file if step.anchor else f"{Path(step.file).parent}/" for step in self.steps})

    def texts(self, without: tuple[str, ...] = ()) -> dict[str, str]:
        """Returns the text of each file after the steps, but for those of the files `without`. Raises Misplaced."""
        found: dict[str, str] = {}
        for step in self.steps:
            path = ROOT / step.file
            before = found.get(step.file, path.read_text("utf-8") if path.exists() else None)
            found[step.file] = step.applied(before)
        return {file: text for file, text in found.items() if file not in without}


def _step(given: dict[str, str]) -> Step:
    if "text" in given:
        return Step(file=given["file"], anchor="", text=given["text"])
    [kind] = given.keys() & {"after", "before", "instead"}
    anchor, add = given[kind], given["add"]
    text = {"after": anchor + add, "before": add + anchor, "instead": add}[kind]
    return Step(file=given["file"], anchor=anchor, text=text)


def _read(path: Path) -> Recipe:
    given = tomllib.loads(path.read_text("utf-8"))
    return Recipe(
        name=path.stem,
        title=given["title"],
        steps=tuple(map(_step, given["step"])),
        notices=tuple(Notice(without=tuple(each["without"]), fail=tuple(each["fail"])) for each in given["notices"]),
        quick=tuple(given["tests"]["quick"]),
        named=tuple(given["tests"]["named"]),
    )


RECIPES = tuple(_read(path) for path in sorted(_FILES.glob("*.toml")))
