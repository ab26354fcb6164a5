"""The flags of `tandem serve`: settings of the programs, and what is refused before any of these starts."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpu_worker.holder import PROGRAM as HOLDER
from gpu_worker.settings import PROGRAM as WORKER
from scheduler_svc.settings import PROGRAM as SCHEDULER
from tandem_client.cli.__main__ import app
from tandem_client.cli.commands import serve
from tandem_client.gateway.settings import PROGRAM as GATEWAY
from tests.client.fake_programs import STAYS, environment, write_programs
from tests.client.fake_service import WAIT_SECONDS
from tests.rigs import processes
from tests.rigs.fifo import Fifo
from tests.rigs.processes import popen

PROGRAMS = {"scheduler": SCHEDULER, "worker": WORKER, "gateway": GATEWAY, "holder": HOLDER}


def test_every_flag_of_the_table_is_a_setting_of_its_programs() -> None:
    for names, each in serve._TABLE:
        assert all(each.name in PROGRAMS[name].model.model_fields for name in names), each.name
    named = [each.name for _, each in serve._TABLE]
    assert len(named) == len(set(named))
    shared = {each.name: names for names, each in serve._TABLE if len(names) > 1}
    assert set(shared) == {"runtime_dir", "log_level", "log_format"}


ONE_OF = "leave one of them out"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--worker", "--device=cuda"], f"--device is cpu and --worker has --device=cuda; {ONE_OF}"),
        (["a/model", "--worker", "--model b"], f"MODEL is a/model and --worker has --model; {ONE_OF}"),
        (
            ["--log-format", "json", "--scheduler", "--log-format text"],
            f"--log-format is json and --scheduler has --log-format; {ONE_OF}",
        ),
        (
            ["--shared-pool", "on", "--worker", "--shared-pool off"],
            f"--shared-pool is on and --worker has --shared-pool; {ONE_OF}",
        ),
        (["--http", "[::1]:1", "--port", "2"], "--http is [::1]:1 and --port is 2; leave all but one out"),
        (
            ["--port", "2", "--gateway", "--listen=[::1]:3"],
            "--port is 2 and --gateway has --listen=[::1]:3; leave all but one out",
        ),
        (["--gateway", "--processes 2"], "--gateway needs --port, the port of the HTTP API"),
        (["--worker", "--model 'b"], "--worker is --model 'b: no closing quotation"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_both_names(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {said}\n"


@pytest.mark.parametrize(
    ("port", "host", "http", "address"),
    [
        (None, None, None, ""),
        (8001, None, None, "127.0.0.1:8001"),
        (0, "localhost", None, "localhost:0"),
        (None, "0.0.0.0", None, "0.0.0.0:8000"),
        (None, "::1", None, "[::1]:8000"),
        (None, "[::1]", None, "[::1]:8000"),
        (None, None, "127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_host_and_port_of_the_http_api(port: int | None, host: str | None, http: str | None, address: str) -> None:
    assert serve._http_address(port, host, http, []) == address


def run(folder: Path, *arguments: str, scheduler: str = STAYS, worker: str = STAYS) -> Any:
    """Runs `tandem serve` with these arguments and programs to its end."""
    write_programs(folder, scheduler=scheduler, worker=worker)
    return processes.run("tandem_client.cli", "serve", *arguments, cwd=folder, env=environment(folder))


def test_refused_settings_of_all_programs_are_printed_once_and_nothing_starts(tmp_path: Path) -> None:
    flags = ["--max-waiting=0", "--runtime-dir", str(tmp_path / "run"), "--log-level=loud"]
    done = run(tmp_path, *flags, "--worker", "--page-size x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: scheduler: --max-waiting is 0; it must be a whole number from 1 to 1,000,000",
        "error: scheduler and worker: --log-level is 'loud'; it must be one of debug, info, warning, error",
        "error: worker: --page-size is 'x'; it must be a whole number, at least 1",
    ]
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("*/*.lives"))


def test_a_runtime_folder_that_others_can_enter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    done = run(tmp_path, "--runtime-dir", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "has mode 0755; it must be 0700" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*/*.lives"))


def test_help_of_a_program_is_printed_in_place_of_a_start(tmp_path: Path) -> None:
    done = run(tmp_path, "--worker", "--help")
    assert (done.returncode, done.stderr) == (0, "") and "--page-size N" in done.stdout
    assert not list(tmp_path.glob("*/*.lives"))


def test_the_settings_reach_their_programs_and_only_these(tmp_path: Path) -> None:
    """An address that is not given stays that of TANDEM_SCHEDULER_LISTEN or a file."""
    os.mkfifo(tmp_path / "up")
    told, awaited = (f"open({str(tmp_path / 'up')!r}, {mode!r}).close()\n" for mode in "wr")
    done = run(
        tmp_path, "a/model", "--served-name=m", "--max-length", "128", "--ranks=2", "--default-max-new-tokens=9",
        "--max-waiting=3", "--metrics-listen", "127.0.0.1:9100",
        "--runtime-dir", str(tmp_path / "run"), "--log-level=debug", "--shared-pool=off",
        scheduler=told + STAYS, worker=f"{awaited}sys.exit(2)",
    )  # fmt: skip
    both = f"--runtime-dir={tmp_path / 'run'} --log-level=debug"
    lines = done.stdout.splitlines()
    worker = f"--model=a/model --served-name=m --ranks=2 --max-length=128 --shared-pool=off {both}"
    assert f"   worker | flags --exit-with-parent {worker}" in lines
    assert done.returncode == 2
    scheduler = f"--default-max-new-tokens=9 --max-waiting=3 --metrics-listen=127.0.0.1:9100 {both}"
    assert f"scheduler | flags --exit-with-parent {scheduler}" in lines


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "error: interrupted before anything has started\n"), (signal.SIGKILL, -9, "")],
)
def test_a_signal_while_settings_are_read_ends_the_reader_and_is_said_once(
    tmp_path: Path, number: int, code: int, said: str
) -> None:
    """The output ends with the last process that has it."""
    write_programs(tmp_path, scheduler=STAYS, worker=STAYS)
    settings = tmp_path / "gpu_worker" / "settings.py"
    settings.unlink()
    given = {"cwd": tmp_path, "env": environment(tmp_path), **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)}
    with Fifo(tmp_path / "reading") as reading:
        settings.write_text(f"import signal\nopen({str(reading.path)!r}, 'w').write('x')\nsignal.pause()\n")
        with popen("tandem_client.cli", "serve", text=True, **given) as process:
            assert reading.read_to_end() == "x"
            process.send_signal(number)
            out, errors = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, out, errors) == (code, "", said)
    assert not list(tmp_path.glob("*/*.lives"))
