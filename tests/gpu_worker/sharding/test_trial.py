"""A plan that no file knows is compared at start, once; a wrong one is refused."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.rigs.processes import child_environment, popen

# Its workers are forked by a process that has imported the compiler, which takes seconds.
pytestmark = pytest.mark.together("compiler")

SAID = "the plan of 2 ranks gives the whole model's logits in this version"
# By numbers of KV heads, each twice, and by faults.
CASES = ("4", "4", "1", "1", "sum", "gemma3n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[tuple[str, ...]]:
    """What each of two ranks prints of each case."""
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    program, given = "tests.gpu_worker.sharding.one_trial", ("2", str(folder), *CASES)
    processes = [
        popen(program, str(rank), *given, env=environment, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return list(zip(*(output.split("---\n")[1:] for output in outputs), strict=True))


@pytest.mark.parametrize("kv_heads", ["4", "1"])
def test_a_right_plan_is_compared_once(printed: list[tuple[str, ...]], folder: Path, kv_heads: str) -> None:
    first = CASES.index(kv_heads)
    assert all(SAID in text for text in printed[first])
    [kept] = (folder / kv_heads / "plans").iterdir()
    assert kept.stat().st_uid == os.getuid()
    assert not any(SAID in text or "refused" in text for text in printed[first + 1])


@pytest.mark.parametrize(
    ("case", "config", "why"),
    [
        ("sum", "LlamaConfig", "logits differ"),
        # Its plan runs without an error.
        ("gemma3n", "Gemma3nTextConfig", ""),
    ],
)
def test_a_wrong_plan_is_refused_and_not_kept(
    printed: list[tuple[str, ...]], folder: Path, case: str, config: str, why: str
) -> None:
    for text in printed[CASES.index(case)]:
        assert f"refused the tensor-parallel plan of {config}" in text and "set ranks to 1" in text
        assert why in text
    assert not (folder / case / "plans").exists()
