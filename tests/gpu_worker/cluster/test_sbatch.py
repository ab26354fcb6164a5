"""The file for Slurm: its syntax, the worker's flags in it, and what it does when a worker ends. srun is a stub."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.rigs.waiting import TIMEOUT_SECONDS

FILE = ROOT / "gpu_worker" / "cluster" / "files" / "lanes.sbatch"
# Writes its arguments to the file `calls`, and ends with the next code of the file `codes`; without one it waits.
SRUN = """#!/bin/bash
cd "$(dirname "$0")"
echo "$*" >> calls
code=$(head -n 1 codes)
sed -i 1d codes
[[ -n "$code" ]] && exit "$code"
trap 'echo left >> calls; exit 0' TERM
echo waits
while true; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "sleep").write_text(f"#!/bin/bash\n[[ $1 == 0.05 ]] && exec {shutil.which('sleep')} 0.05\nexit 0\n")
    (tmp_path / "sleep").chmod(0o755)
    return tmp_path


def start(slurm: Path, codes: list[int], **variables: str) -> "subprocess.Popen[str]":
    (slurm / "codes").write_text("".join(f"{code}\n" for code in codes))
    settings = {"TANDEM_CONNECT": "tcp://s:1", "TANDEM_KEYS": "/k", "TANDEM_MODEL": "/m", **variables}
    return subprocess.Popen(
        ["bash", str(FILE), "--max-rows", "4"],
        env={**os.environ, **settings, "PATH": f"{slurm}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls(slurm: Path) -> list[str]:
    return (slurm / "calls").read_text().splitlines()


def test_it_is_a_valid_script() -> None:
    subprocess.run(["bash", "-n", str(FILE)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(FILE)], check=True)


def test_every_flag_of_the_worker_exists() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    after = FILE.read_text().split("-m gpu_worker", 1)[1].split("&\n", 1)[0]
    used = re.findall(r"--[a-z-]+", after)
    assert len(used) >= 5
    assert [flag for flag in used if not re.search(rf"^\s*(-\w, )?{flag}\b", done.stdout, re.MULTILINE)] == []


def test_a_worker_that_ends_is_started_again_until_its_settings_are_refused(slurm: Path) -> None:
    script = start(slurm, [1, 0, -9 % 256, 2])
    output, _ = script.communicate(timeout=TIMEOUT_SECONDS)
    assert script.returncode == 2
    assert len(calls(slurm)) == 4
    assert calls(slurm)[0] == (
        "--kill-on-bad-exit=1 python3 -P -m gpu_worker --connect tcp://s:1 --keys /k --model /m --device cuda "
        "--exit-with-parent --max-rows 4"
    )
    assert "the worker ended with exit code 1; it starts again in 1 s" in output


def test_failures_in_a_row_are_bounded(slurm: Path) -> None:
    script = start(slurm, [1] * 9, TANDEM_MAX_FAILURES="3")
    output, _ = script.communicate(timeout=TIMEOUT_SECONDS)
    assert script.returncode == 1 and len(calls(slurm)) == 3
    assert "the worker failed 3 times in a row, the last time with exit code 1" in output


def test_the_signal_before_the_time_limit_lets_the_worker_leave(slurm: Path) -> None:
    script = start(slurm, [])
    assert script.stdout is not None and script.stdout.readline() == "waits\n"
    script.send_signal(signal.SIGTERM)
    script.communicate(timeout=TIMEOUT_SECONDS)
    assert script.returncode == 0 and calls(slurm)[-1] == "left" and len(calls(slurm)) == 2


@pytest.mark.parametrize("name", ["TANDEM_CONNECT", "TANDEM_KEYS", "TANDEM_MODEL"])
def test_a_missing_variable_is_named(name: str, slurm: Path) -> None:
    script = start(slurm, [], **{name: ""})
    output, _ = script.communicate(timeout=TIMEOUT_SECONDS)
    assert script.returncode != 0 and f"{name}: must be" in output and not (slurm / "calls").exists()
