"""A plan that no file knows is compared at start, once; a wrong one is refused."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.rigs.processes import child_environment, popen

SAID = "the plan of 2 ranks gives the whole model's logits in this version"


def run_trial(folder: Path, *, kv_heads: int = 4, fault: str = "") -> list[str]:
    """What each of two ranks prints; their cache is in `folder`."""
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    meeting.mkdir()
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    program = "tests.gpu_worker.sharding.one_trial"
    given = ("2", str(meeting), str(kv_heads), fault)
    processes = [
        popen(program, str(rank), *given, env=environment, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    return printed


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_right_plan_is_compared_once(tmp_path: Path, kv_heads: int) -> None:
    assert all(SAID in text for text in run_trial(tmp_path, kv_heads=kv_heads))
    [kept] = (tmp_path / "plans").iterdir()
    assert kept.stat().st_uid == os.getuid()
    assert not any(SAID in text or "refused" in text for text in run_trial(tmp_path, kv_heads=kv_heads))


def test_a_wrong_plan_is_refused_and_not_kept(tmp_path: Path) -> None:
    for text in run_trial(tmp_path, fault="sum"):
        assert "refused the tensor-parallel plan of LlamaConfig" in text and "set ranks to 1" in text
        assert "logits differ" in text
    assert not (tmp_path / "plans").exists()


def test_a_plan_that_is_wrong_without_an_error_is_refused_although_it_runs(tmp_path: Path) -> None:
    for text in run_trial(tmp_path, fault="gemma3n"):
        assert "refused the tensor-parallel plan of Gemma3nTextConfig" in text and "set ranks to 1" in text
    assert not (tmp_path / "plans").exists()
