"""The tables of phases and states in the core's README are those that the code runs by."""

import re
from enum import StrEnum

import pytest

from scheduler_svc.core.state import lane_resources
from scheduler_svc.core.state.request import TRANSITIONS
from tests.architecture.source import ROOT

README = ROOT / "scheduler_svc" / "core" / "README.md"


def documented(heading: str) -> set[tuple[str, str, str]]:
    """The rows of the table with the columns from, move and to; a row may list several phases in its first column."""
    text = README.read_text()
    text = text[text.index(heading) :]
    table = text[text.index("| from | move | to |") :].split("\n\n")[0]
    rows = [re.findall(r"[a-z][a-z, ]*", line) for line in table.splitlines()[2:]]
    return {(phase.strip(), move.strip(), to.strip()) for sources, move, to in rows for phase in sources.split(",")}


@pytest.mark.parametrize(
    ("heading", "transitions"), [("## Phases", TRANSITIONS), ("**Resources**", lane_resources.TRANSITIONS)]
)
def test_the_readme_lists_exactly_the_transitions_of_the_code(
    heading: str, transitions: dict[tuple[StrEnum, StrEnum], StrEnum]
) -> None:
    assert documented(heading) == {(at.value, move.value, to.value) for (at, move), to in transitions.items()}
