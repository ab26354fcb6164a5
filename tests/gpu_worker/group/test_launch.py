"""The launcher: a refusal ends it with the rank's exit code, a loss starts all ranks again. Real processes."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.group.launch import Meeting, launch
from tests.rigs.processes import REPOSITORY, child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS, until

LAUNCH = """
import sys
from gpu_worker.group.launch import STORE_VARIABLE, Meeting, launch
raise SystemExit(launch(2, [STORE_VARIABLE, *sys.argv[1:]], Meeting(), "tests.gpu_worker.group.one_rank"))
"""

# One host of two; both are this one.
LAUNCH_HALF = """
import sys
from gpu_worker.group.launch import STORE_VARIABLE, Meeting, launch
meeting = Meeting(num_hosts=2, host="127.0.0.1", port=int(sys.argv[1]), run_id="hosts-x", address="127.0.0.1")
raise SystemExit(launch(2, [STORE_VARIABLE, *sys.argv[2:]], meeting, "tests.gpu_worker.group.one_rank"))
"""


def launched(folder: Path, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, str(folder), what],
        cwd=REPOSITORY,
        env=child_environment() | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
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
    assert "rank 1 was ended by SIGKILL\n" in done.stderr
    assert [len(list(tmp_path.glob(f"{rank}-*"))) for rank in (0, 1)] == [2, 2]


def test_each_start_has_a_folder_of_its_own_which_does_not_outlive_it(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = launched(tmp_path, "tidied", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert [len(list(tmp_path.glob(f"{rank}-*"))) for rank in (0, 1)] == [2, 2]
    assert list(temporary.iterdir()) == []


def test_sigterm_is_for_the_leader_who_ends_the_group_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), "lead"]
    launcher = subprocess.Popen(command, cwd=REPOSITORY, env=child_environment())
    until((tmp_path / "leads").exists, "the leader")
    launcher.terminate()
    assert launcher.wait(TIMEOUT_SECONDS) == 0
    assert (tmp_path / "followed").exists()


def test_ranks_that_the_system_cannot_start_end_the_launcher_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match=r"^the group of 2 ranks could not be started: No such file or directory$"):
        launch(2, [], Meeting())


@pytest.mark.parametrize(("what", "starts"), [("end", 1), pytest.param("die", 2, marks=pytest.mark.long)])
def test_two_launchers_start_the_ranks_of_a_group_together(tmp_path: Path, what: str, starts: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", LAUNCH_HALF, str(port), str(tmp_path), what]
    halves = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [half.communicate(timeout=TIMEOUT_SECONDS) for half in halves]
    assert [half.returncode for half in halves] == [0, 0], outputs
    assert [len(list(tmp_path.glob(f"{rank}-*"))) for rank in (0, 1)] == [starts, starts]
