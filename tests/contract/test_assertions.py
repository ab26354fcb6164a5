"""No program of Tandem runs without assertions, and the client's package needs none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.test_working_directory import ENTRIES

OWN_NAMES = {"tandem_client": "tandem", "gpu_worker": "gpu_worker", "scheduler_svc": "scheduler_svc"}


def run(*command: str, **changed: str) -> subprocess.CompletedProcess[str]:
    argv, own = [sys.executable, *command], child_environment() | changed
    return subprocess.run(argv, env=own, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("module", ENTRIES.values())
def test_every_program_is_refused_without_assertions_in_one_line(module: str) -> None:
    done = run("-OO", "-P", "-m", module, "--help")
    name = OWN_NAMES[module.partition(".")[0]]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{name}: Python's -O, -OO and PYTHONOPTIMIZE leave out the assertions that end a program in a wrong "
        "state; start it without them\n"
    )


def test_the_command_of_an_installation_is_refused_too(tmp_path: Path) -> None:
    command = tmp_path / "tandem"
    command.write_text("from tandem_client.cli.__main__ import main\nmain()\n")
    done = run(str(command), "--version", PYTHONOPTIMIZE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tandem: Python's -O, ")
    assert run(str(command), "--version").returncode == 0


def test_the_clients_package_is_imported_without_assertions() -> None:
    done = run("-OO", "-c", "import tandem_client; print(tandem_client.Client('127.0.0.1:1').address)")
    assert (done.returncode, done.stderr) == (0, "")
