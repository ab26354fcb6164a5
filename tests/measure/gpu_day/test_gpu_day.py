"""`make gpu-day` on a CPU: every part runs to its end on tiny shapes, and its results say what they shall.

Figures are not judged. What counts is that tokens are whole and equal, and that a killed part leaves its results.
"""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.measure.gpu_day import workloads
from tests.measure.gpu_day.part_table import BY_NAME, CORE, PARTS, Part
from tests.measure.gpu_day.processes import Request, run_part
from tests.measure.gpu_day.report import RESULTS, SUMMARY, Report
from tests.rigs.processes import REPOSITORY, child_environment
from tests.rigs.waiting import until

# A cold compile cache: a CPU takes half a minute for a kernel on a busy machine.
pytestmark = pytest.mark.timeout(1800)

# Those with a test of their own are left out.
OTHERS = tuple(
    part.name for part in PARTS if part.name not in ("graphs", "families", "attention", "recovery", "serving")
)


def run_day(folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs parts on a CPU. Returns their results."""
    command = [
        sys.executable,
        "-m",
        "tests.measure.gpu_day",
        *arguments,
        "--tiny",
        "--device",
        "cpu",
        "--out",
        str(folder),
    ]
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return json.loads((folder / RESULTS).read_text())["parts"]


def checks(part: dict[str, Any]) -> list[str]:
    return [check["name"] for check in part["checks"] if check["ok"]]


def value(part: dict[str, Any], name: str) -> float:
    [figure] = [figure for figure in part["figures"] if figure["name"] == name]
    return figure["value"]


def table(part: dict[str, Any], begin: str) -> dict[str, Any]:
    [found] = [table for table in part["tables"] if table["title"].startswith(begin)]
    return found


def test_graphs_are_captured_and_change_nothing(tmp_path: Path) -> None:
    """With attention that compiles nothing. FlexAttention's kernels: the long test below."""
    check_graphs(run_day(tmp_path, "graphs", "--plain-attention")["graphs"])


@pytest.mark.long
def test_graphs_of_compiled_attention_change_nothing(tmp_path: Path) -> None:
    check_graphs(run_day(tmp_path, "graphs")["graphs"])


def check_graphs(part: dict[str, Any]) -> None:
    assert part["outcome"] == "passed"
    assert value(part, "graphs") == 3
    equal = [name for name in checks(part) if "with graphs equal those without" in name]
    assert len(equal) == 4
    details = [check["detail"] for check in part["checks"] if ": tokens" in check["name"]]
    assert all(detail.startswith(f"{workloads.tiny().num_output_tokens} tokens") for detail in details)


@pytest.mark.long
def test_families_compare_logits(tmp_path: Path) -> None:
    assert len(checks(run_day(tmp_path, "families")["families"])) == 2


@pytest.mark.long
def test_serving_delivers_the_whole_workload(tmp_path: Path) -> None:
    part, requests = run_day(tmp_path, "serving")["serving"], workloads.tiny()
    assert value(part, "output tokens") == requests.num_output_tokens
    assert value(part, "prompt tokens") == requests.num_prompt_tokens
    assert value(part, "runner alone") > 0
    assert value(part, "whole service") > 0
    assert "run 1: every request has its tokens" in checks(part)


@pytest.mark.long
def test_attention_has_a_best_option_for_each_bucket(tmp_path: Path) -> None:
    part = run_day(tmp_path, "attention")["attention"]
    measured, best = table(part, "Decode attention"), table(part, "Best options")
    assert len(measured["rows"]) == 2
    assert [row[:4] for row in best["rows"]] == [["float32", 16, 2, 2]]
    assert best["rows"][0][5] == max(row[4] for row in measured["rows"])


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_part_passes(name: str, tmp_path: Path) -> None:
    part = run_day(tmp_path, name)[name]
    assert part["outcome"] == "passed"
    assert part["figures"] or part["tables"]


@pytest.mark.long
def test_a_killed_worker_loses_no_token(tmp_path: Path) -> None:
    part = run_day(tmp_path, "recovery")["recovery"]
    assert "bundled model, a standby worker takes the pool over: it did" in checks(part)
    for case in ("another serves", "a worker starts", "a standby worker takes the pool over"):
        assert f"bundled model, {case}: tokens equal those of an undisturbed run" in checks(part)
        assert value(part, f"bundled model, {case}: pause") > 0


def test_the_workload_is_nano_vllms() -> None:
    requests = workloads.nano_vllm()
    assert len(requests.prompts) == 256
    assert (requests.num_prompt_tokens, requests.num_output_tokens) == workloads.NANO_VLLM_TOKENS
    assert requests.max_length <= 2048


def test_the_core_set_fits_its_time() -> None:
    assert sum(BY_NAME[name].limit_seconds for name in CORE) <= 22 * 60
    assert all(part.limit_seconds < 9 * 60 for part in PARTS)


@pytest.fixture
def stopped(tmp_path: Path) -> dict[str, Any]:
    """The result of a part that reached its limit when its figure was there."""
    report, late = Report(tmp_path, {}), [0.0]

    def on_change(outcome: str, seconds: float, content: dict[str, Any]) -> None:
        report.update("endless", outcome, seconds, content)
        if content.get("figures"):
            late[0] = 1e6

    part = Part(name="endless", about="", limit_seconds=1)
    request = Request(device="cpu", tiny=False, flex_nano_vllm="")
    spawning = multiprocessing.get_context("spawn")
    run_part(spawning, part, request, 1e5, on_change, clock=lambda: time.monotonic() + late[0])
    return json.loads((tmp_path / RESULTS).read_text())["parts"]["endless"]


def test_a_part_beyond_its_limit_is_killed_with_its_processes_and_leaves_its_figures(stopped: dict[str, Any]) -> None:
    assert stopped["outcome"].startswith("stopped")
    assert stopped["notes"] == ["what the process said"]
    pid = int(value(stopped, "process"))
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")


def test_a_check_that_is_not_ok_fails_its_part(tmp_path: Path) -> None:
    report = Report(tmp_path, {})
    report.update("one", "passed", 1.0, {"checks": [{"name": "tokens are equal", "ok": False, "detail": "3 of 4"}]})
    assert not report.all_passed(["one"])
    assert "failed: tokens are equal" in (tmp_path / SUMMARY).read_text()


def test_a_later_command_keeps_the_results_of_an_earlier_one(tmp_path: Path) -> None:
    Report(tmp_path, {}).update("one", "passed", 1.0, {})
    later = Report(tmp_path, {})
    later.update("two", "passed", 1.0, {})
    assert later.all_passed(["one", "two"])
    assert len(list(tmp_path.iterdir())) == 2
