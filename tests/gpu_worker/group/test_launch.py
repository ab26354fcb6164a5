"""The launcher: a refusal ends it with the rank's exit code, a loss starts all ranks again. Real processes."""

import subprocess
import sys
from pathlib import Path

from tests.rigs.processes import REPOSITORY, child_environment

LAUNCH = """
import sys
from gpu_worker.group.launch import launch
raise SystemExit(launch(2, sys.argv[1:], "tests.gpu_worker.group.one_rank"))
"""


def launched(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, str(folder), what],
        cwd=REPOSITORY,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_refusal_of_one_rank_ends_the_group_with_its_sentence(tmp_path: Path) -> None:
    done = launched(tmp_path, "refuse")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["rank 1 refuses"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_lost_rank_starts_all_again(tmp_path: Path) -> None:
    done = launched(tmp_path, "die")
    assert done.returncode == 0, done.stderr
    assert [len(list(tmp_path.glob(f"{rank}-*"))) for rank in (0, 1)] == [2, 2]
