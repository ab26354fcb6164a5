"""The tables of phases and states in the core's README are those that the code runs by."""

import re
from collections.abc import Mapping
from enum import StrEnum

import pytest

from scheduler_svc.core.state import lane_resources
from scheduler_svc.core.state.lane_phase import LANE_TRANSITIONS
from scheduler_svc.core.state.request import TRANSITIONS
from tests.architecture.source import ROOT

README = ROOT / "scheduler_svc" / "core" / "README.md"
HEAD = "| from | move | to |"


def documented(number: int) -> set[tuple[str, str, str]]:
    """The rows of a table with the columns from, move and to; a row may list several phases in its first column."""
    table = README.read_text().split(HEAD)[number].split("\n\n")[0]
    rows = [re.findall(r"[a-z][a-z, ]*", line) for line in table.splitlines()[2:]]
    return {(phase.strip(), move.strip(), to.strip()) for sources, move, to in rows for phase in sources.split(",")}


@pytest.mark.parametrize(
    ("number", "table"),
    [(1, lane_resources.TRANSITIONS), (2, TRANSITIONS), (3, LANE_TRANSITIONS)],
    ids=["resource", "request", "lane"],
)
def test_the_readme_lists_exactly_the_transitions_of_the_code(
    number: int, table: Mapping[tuple[StrEnum, StrEnum], StrEnum]
) -> None:
    assert documented(number) == {(phase.value, move.value, to.value) for (phase, move), to in table.items()}
