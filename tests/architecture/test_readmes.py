"""Lists and tables in READMEs are those of the code: RPCs, protos, modules, phases."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import pytest
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.state import lane_resources
from scheduler_svc.core.state.lane_phase import LANE_TRANSITIONS
from scheduler_svc.core.state.request import TRANSITIONS
from scheduler_svc.frontend import methods
from scheduler_svc.frontend.sizes import MAX_ABORT_BYTES
from tests.architecture.source import ROOT

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
)


def text(path: str) -> str:
    return (ROOT / path).read_text()


def first_cells(path: str, head: str) -> list[str]:
    """The words in backquotes of one column of the table that begins with `head`; modules without their ending."""
    table = text(path).split(head, 1)[1].split("\n\n")[0]
    column = head.strip("| ").split(" | ").index("modules") if "modules" in head else 0
    cells = [line.strip("|").split("|")[column] for line in table.splitlines()[2:]]
    return [name.removesuffix(".py") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_protos_readme_lists_every_rpc_and_every_file() -> None:
    rpcs = [f"{service.name}.{method.name}" for service in SERVICES for method in service.methods]
    assert first_cells("protos/README.md", "| RPC | what it does | command |") == rpcs
    listed = text("protos/README.md").split("## tandem_contract")[0]
    for package in ("tandem/v1", "tandem/internal/v1"):
        part = listed.split(f"- `{package}/`:", 1)[1].split("\n- ")[0].split("\n\n")[0]
        files = {path.name for path in (ROOT / "protos" / package).glob("*.proto")}
        assert set(re.findall(r"`(\w+\.proto)`", part)) == files


def test_the_front_ends_readme_lists_every_module_and_every_small_message_of_inference() -> None:
    here = Path("scheduler_svc/frontend")
    tree = {path.name.removesuffix(".py") for path in (ROOT / here).iterdir() if path.suffix in (".py", "")}
    named = first_cells(f"{here}/README.md", "| read | modules | own |")
    assert {name.removesuffix("/") for name in named} == tree - {"__init__", "__pycache__"}
    (row,) = re.findall(r"^\| ([\w, ]+) messages \| 64 KiB plus", text(f"{here}/README.md"), re.MULTILINE)
    streams = ("Generate", "Resume")
    assert row.split(", ") == [each.name for each in methods.INFERENCE.methods if each.name not in streams]
    assert f"; Abort {MAX_ABORT_BYTES // 1024} KiB |" in text(f"{here}/README.md")


def test_the_readme_of_what_programs_share_lists_every_module() -> None:
    modules = {path.stem for path in (ROOT / "protos/tandem_contract").glob("*.py")} - {"__init__"}
    assert set(first_cells("protos/README.md", "| module | what programs agree on |")) == modules


@pytest.mark.parametrize(
    ("number", "table"),
    [(1, lane_resources.TRANSITIONS), (2, TRANSITIONS), (3, LANE_TRANSITIONS)],
    ids=["resource", "request", "lane"],
)
def test_the_readme_lists_exactly_the_transitions_of_the_code(
    number: int, table: Mapping[tuple[StrEnum, StrEnum], StrEnum]
) -> None:
    shown = text("scheduler_svc/core/README.md").split("| from | move | to |")[number].split("\n\n")[0]
    rows = [re.findall(r"[a-z][a-z, ]*", line) for line in shown.splitlines()[2:]]
    # A row may list several phases in its first column.
    documented = {
        (phase.strip(), move.strip(), to.strip()) for sources, move, to in rows for phase in sources.split(",")
    }
    assert documented == {(phase.value, move.value, to.value) for (phase, move), to in table.items()}
