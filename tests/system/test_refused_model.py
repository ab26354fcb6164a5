"""A folder without a model ends `tandem serve` with the sentence of the worker, and exit code 2: a wrong setting."""

import shlex
from pathlib import Path

from gpu_worker.checkpoint.recognise import Found, Kind
from tests.rigs.processes import run


def test_serve_ends_with_what_the_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "qwen.gguf").touch()
    flags = ["--listen", "127.0.0.1:0", "--runtime-dir", str(tmp_path / "run")]
    done = run("tandem_client.cli", "serve", *flags, "--worker", shlex.join(["--model", f"{tmp_path}/m"]))
    assert done.returncode == 2, done.stderr
    sentence = Found(Kind.GGUF, "qwen.gguf").sentence(tmp_path / "m")
    assert done.stderr.splitlines()[-1].endswith(f"gpu_worker: {sentence}")
