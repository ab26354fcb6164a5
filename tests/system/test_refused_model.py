"""A folder without a model ends `tandem serve` with the sentence of the worker, and exit code 2: a wrong setting."""

import shlex
import subprocess
import sys
from pathlib import Path

from gpu_worker.checkpoint.recognise import Found, Kind
from tests.rigs.processes import REPOSITORY, child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS


def test_serve_ends_with_what_the_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "qwen.gguf").touch()
    flags = ["--listen", "127.0.0.1:0", "--runtime-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "tandem_client.cli",
            "serve",
            *flags,
            "--worker",
            shlex.join(["--model", f"{tmp_path}/m"]),
        ],
        cwd=REPOSITORY,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    sentence = Found(Kind.GGUF, "qwen.gguf").sentence(tmp_path / "m")
    assert done.stderr.splitlines()[-1].endswith(f"gpu_worker: {sentence}")
