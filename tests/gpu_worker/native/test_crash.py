"""What a worker leaves on stderr when a signal of its own code ends it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.native.library import HINTS
from tests.gpu_worker.saved_model import save_model
from tests.rigs.processes import REPOSITORY, run

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


@pytest.mark.usefixtures("kernel_folder")
def test_every_signal_leaves_a_line_with_the_phase_and_a_hint() -> None:
    command = [sys.executable, "-c", _EACH_SIGNAL]
    done = subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, check=False)
    status, lines = done.returncode, done.stderr.splitlines()
    ends = [i for i, line in enumerate(lines) if line.startswith("status ")]
    assert (status, [lines[i] for i in ends]) == (0, [f"status {-number}" for number in HINTS] * 2)
    # Python's own stacks come before.
    assert sum(line.startswith("Fatal Python error: ") for line in lines) == len(ends)
    for case, i in enumerate(ends):
        number = list(HINTS)[case % len(HINTS)]
        cause = f'native code was ended by {number.name} in the phase "a "phase"", or right after it; {HINTS[number]}'
        is_text = case < len(HINTS)
        assert lines[i - 1] == f"gpu_worker: {cause}" if is_text else json.loads(lines[i - 1])["message"] == cause


# The worker is forked by a process that has imported torch, which takes seconds.
@pytest.mark.together("torch")
@pytest.mark.usefixtures("kernel_folder")
def test_a_crash_at_warm_up_is_the_last_line_of_the_worker(tmp_path: Path) -> None:
    flags = ["--model", str(save_model(tmp_path / "model")), "--device", "cpu", "--runtime-dir", str(tmp_path / "run")]
    ended = run("tests.gpu_worker.native.crashing_worker", *flags, "--max-length", "64", "--threads", "1")
    assert ended.returncode == -signal.SIGSEGV
    assert ended.stderr.splitlines()[-1] == (
        'gpu_worker: native code was ended by SIGSEGV in the phase "warm-up", or right after it; '
        "--native-kernels off serves without the C++ kernels, more slowly"
    )
