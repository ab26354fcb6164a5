"""The table of phases in the core's README is the table that the code runs by."""

import re

from scheduler_svc.core.state.request import TRANSITIONS
from tests.architecture.source import ROOT

README = ROOT / "scheduler_svc" / "core" / "README.md"


def documented() -> set[tuple[str, str, str]]:
    """The rows of the table with the columns from, move and to; a row may list several phases in its first column."""
    text = README.read_text()
    table = text[text.index("| from | move | to |") :].split("\n\n")[0]
    rows = [re.findall(r"[a-z][a-z, ]*", line) for line in table.splitlines()[2:]]
    return {(phase.strip(), move.strip(), to.strip()) for sources, move, to in rows for phase in sources.split(",")}


def test_the_readme_lists_exactly_the_transitions_of_the_code() -> None:
    assert documented() == {(phase.value, move.value, to.value) for (phase, move), to in TRANSITIONS.items()}
