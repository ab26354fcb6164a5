"""Errors that need no torch are reported without importing it, as a fresh interpreter shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.__main__ import check_before_imports, check_threads
from gpu_worker.settings import BUNDLED_MODEL, WorkerSettings
from scheduler_svc.wire.worker import event_of
from tandem_contract.bounds import WireError
from tandem_contract.files import KEY_NAME
from tandem_contract.settings import SettingError
from tests.architecture.source import ROOT
from tests.rigs.waiting import TIMEOUT_SECONDS

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")
# Runs the program as __main__ does, then lists the loaded modules of HEAVY.
PROBE = f"""
import json, sys
from gpu_worker.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def run(*arguments: str, **environment: str) -> tuple[int, list[str], str, str]:
    """(exit code, heavy modules that were loaded, stdout before the probe's line, stderr)."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos"), str(ROOT / ".stubs")])
    own = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    process = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        env={**own, "PYTHONPATH": paths, **environment},
        timeout=TIMEOUT_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    *shown, last = process.stdout.splitlines()
    code, loaded = json.loads(last)
    return code, loaded, "\n".join(shown), process.stderr


def test_a_rank_of_another_group_ends_in_one_line() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    code, loaded, _, stderr = run("--ranks", "2", **place)
    problem = "ranks is 2 and torchrun has started 3 processes (WORLD_SIZE); make both equal"
    assert (code, loaded, stderr) == (2, [], f"gpu_worker: {problem}\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--page-size", "100"], "page_size is 100; it must be a power of two, 16 to 65536"),
        (["--max-rows", "lots"], "--max-rows is 'lots'; it must be a whole number"),
        (["--nope", "3"], "there is no flag --nope; did you mean --nnodes?"),
        (["--model", "/no/such/model"], "model folder /no/such/model does not exist; model is a folder or a hub"),
        (["--model", "/etc"], "/etc has neither config.json nor model.safetensors; give the folder of a model"),
        (["--runtime-dir", "/etc/passwd/run"], "runtime_dir /etc/passwd/run cannot be used: Not a directory"),
        (["--runtime-dir", "/etc/passwd"], "runtime_dir /etc/passwd is not a folder"),
    ],
)
def test_a_wrong_setting_ends_in_one_line_before_torch(arguments: list[str], problem: str, tmp_path: Path) -> None:
    code, loaded, shown, stderr = run("--runtime-dir", str(tmp_path / "run"), *arguments)
    assert (code, loaded, shown) == (2, [], "")
    assert stderr.startswith(f"gpu_worker: {problem}")
    assert stderr.count("\n") == 1


def test_a_refused_start_is_a_json_object_in_a_json_log(tmp_path: Path) -> None:
    flags = ["--runtime-dir", str(tmp_path / "run"), "--model", "/no/such/model", "--log-level", "error"]
    *_, stderr = run(*flags, TANDEM_LOG_FORMAT="json")
    entry = json.loads(stderr)
    assert (entry["level"], entry["process"]) == ("CRITICAL", "worker")
    assert entry["message"].startswith("model folder /no/such/model does not exist; ")


def test_version_and_help_are_shown_without_torch() -> None:
    code, loaded, shown, stderr = run("--version")
    assert (code, loaded, shown, stderr) == (0, [], "tandem 0.1.0", "")
    code, loaded, shown, stderr = run("--help", COLUMNS="100")
    assert (code, loaded, stderr) == (0, [], "")
    assert shown.startswith("usage: python -m gpu_worker [FLAG ...]\n\nA Tandem worker: ")
    # Types are shown as words, and no default appears twice.
    assert "ByteSize" not in shown
    assert "(default" not in shown
    for name in WorkerSettings.model_fields:
        assert shown.count(f"--{name.replace('_', '-')} ") + shown.count(f"--{name.replace('_', '-')},") >= 1, name


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"page_size": 8}, "page_size is 8; it must be a power of two, 16 to 65536"),
        ({"num_pages": 1}, "num_pages is 1; it must be 2 to 1048576"),
        ({"max_rows": 70_000}, "max_rows is 70000; it must be 1 to 65536"),
        ({"max_length": 1}, "max_length is 1; it must be 2 to 16777216"),
        ({"token_budget": 95}, r"token_budget is 95; it must be at least 96 \(max_rows 32 and one chunk of 64\)"),
        ({"token_budget": 383, "device": "cuda:1"}, r"must be at least 384 \(max_rows 256 and one chunk of 128\)"),
        ({"token_budget": 100, "max_rows": 37}, "token_budget is 100; it must be at least 101"),
        ({"window": 60, "window_sinks": 4, "max_length": 64}, "window is 60 and window_sinks 4; together they must be"),
        ({"threads": 100_000}, r"threads is 100000; this process may use \d+ CPUs"),
    ],
)
def test_numbers_that_cannot_work_are_refused_by_name(
    settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=problem):
        check_before_imports(WorkerSettings(runtime_dir=tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["page_size", "num_pages", "max_rows", "max_length", "token_budget"])
def test_what_the_scheduler_refuses_in_a_join_is_refused_before_torch(name: str, tmp_path: Path) -> None:
    join = pb.Join(
        protocol=pb.PROTOCOL_CURRENT, identity="i", model="m", vocab_size=9, num_pages=9, max_rows=3, max_length=32,
        page_size=16, chunk_align=2, max_frame_bytes=1 << 20,
    )  # fmt: skip
    join.token_budget = join.logit_rows = 1 << 20
    setattr(join, name, (1 << 32) - 1)
    with pytest.raises(WireError) as refused:
        event_of(pb.WorkerToCore(join=join), "worker")
    limit = re.fullmatch(rf"{name} is \d+; it must be \d+ to (\d+)", str(refused.value))
    assert limit is not None, refused.value
    value = 2 * int(limit[1])
    with pytest.raises(SettingError, match=f"{name} is {value}; it must be .*{limit[1]}$"):
        check_before_imports(WorkerSettings(runtime_dir=tmp_path / "run", **{name: value}))


def test_settings_that_may_work_pass(tmp_path: Path) -> None:
    settings = WorkerSettings(
        runtime_dir=tmp_path / "run", token_budget=96, page_size=16, max_length=65, window=60, window_sinks=4, threads=1
    )
    assert check_before_imports(settings) == BUNDLED_MODEL.resolve()
    check_threads(None)


def test_preflight_creates_the_runtime_folder_and_its_key(tmp_path: Path) -> None:
    """A worker that starts before its scheduler creates both; their faults are reported before torch is loaded."""
    settings = WorkerSettings(runtime_dir=tmp_path / "run")
    check_before_imports(settings)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert len((tmp_path / "run" / KEY_NAME).read_bytes()) == 32
    (tmp_path / "run" / KEY_NAME).chmod(0o644)
    with pytest.raises(ValueError, match=r"with mode 0600; it belongs to user .* has mode 0644"):
        check_before_imports(settings)
