"""What a worker leaves on stderr when a signal of its own code ends it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.native.library import HINTS
from tests.gpu_worker.saved_model import save_model
from tests.rigs.processes import REPOSITORY

# One child for each signal and format of the log: they share the imports.
_EACH_SIGNAL = """
import faulthandler, os, signal
from gpu_worker import phases
from gpu_worker.native.library import HINTS, write_last_line
from tandem_contract import logs

faulthandler.enable()
for log_format in ("text", "json"):
    logs.start("worker", level="error", log_format=log_format)
    write_last_line()
    phases.begin_phase("a \\"phase\\"")
    for number in HINTS:
        if not (child := os.fork()):
            signal.raise_signal(number)
        status = os.waitpid(child, 0)[1]
        os.write(2, f"status {os.waitstatus_to_exitcode(status)}\\n".encode())
"""
# The worker as a program. In its warm-up it overwrites its stack, to the end and beyond, so that the stacks that Python
# writes are a second crash.
_CRASHING_WORKER = """
import ctypes, runpy
from pathlib import Path
from gpu_worker import phases

begin = phases.begin_phase

def crashes(name):
    begin(name)
    if name == "warm-up":
        [line] = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[stack]")]
        end = int(line.split()[0].split("-")[1], 16)
        ctypes.memset(end - (1 << 17), 255, 1 << 18)

phases.begin_phase = crashes
runpy.run_module("gpu_worker", run_name="__main__", alter_sys=True)
"""


def run(script: str, *arguments: str) -> tuple[int, list[str]]:
    """The exit status and the lines on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.usefixtures("kernel_folder")
def test_every_signal_leaves_a_line_with_the_phase_and_a_hint() -> None:
    status, lines = run(_EACH_SIGNAL)
    ends = [i for i, line in enumerate(lines) if line.startswith("status ")]
    assert (status, [lines[i] for i in ends]) == (0, [f"status {-number}" for number in HINTS] * 2)
    # Python's own stacks come before.
    assert sum(line.startswith("Fatal Python error: ") for line in lines) == len(ends)
    for case, i in enumerate(ends):
        number = list(HINTS)[case % len(HINTS)]
        cause = f'native code was ended by {number.name} in the phase "a "phase"", or right after it; {HINTS[number]}'
        is_text = case < len(HINTS)
        assert lines[i - 1] == f"gpu_worker: {cause}" if is_text else json.loads(lines[i - 1])["message"] == cause


@pytest.mark.usefixtures("kernel_folder")
def test_a_crash_at_warm_up_is_the_last_line_of_the_worker(tmp_path: Path) -> None:
    flags = ["--model", str(save_model(tmp_path / "model")), "--device", "cpu", "--runtime-dir", str(tmp_path / "run")]
    status, lines = run(_CRASHING_WORKER, *flags, "--max-length", "64", "--threads", "1")
    assert status == -signal.SIGSEGV
    assert lines[-1] == (
        'gpu_worker: native code was ended by SIGSEGV in the phase "warm-up", or right after it; '
        "--native-kernels off serves without the C++ kernels, more slowly"
    )
