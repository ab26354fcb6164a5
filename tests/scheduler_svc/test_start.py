"""What a person meets before anything runs: settings, the runtime folder, a port that is taken."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc import config
from scheduler_svc.runtime_dir import RuntimeDir


def load(monkeypatch: pytest.MonkeyPatch, *flags: str, **variables: str) -> config.SchedulerSettings:
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return config.load(list(flags))


def test_flags_beat_the_environment_which_beats_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("max_waiting = 1\ngrace_seconds = 1\ndefault_max_new_tokens = 1\n")
    settings = load(
        monkeypatch, "--config", str(file), "--max-waiting", "3",
        TANDEM_MAX_WAITING="2", TANDEM_GRACE_SECONDS="2",
    )  # fmt: skip
    assert (settings.max_waiting, settings.grace_seconds, settings.default_max_new_tokens) == (3, 2.0, 1)
    by_variable = load(monkeypatch, TANDEM_CONFIG=str(file))
    assert by_variable.max_waiting == 1


def test_unknown_names_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="TANDEM_MAX_WAITNG"):
        load(monkeypatch, TANDEM_MAX_WAITNG="2")
    file = tmp_path / "tandem.toml"
    file.write_text("max_waitng = 1\n")
    with pytest.raises(SystemExit, match="max_waitng"):
        load(monkeypatch, "--config", str(file))
    with pytest.raises(SystemExit):
        load(monkeypatch, "--max-waitng", "1")
    assert "max-waitng" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="is no file"):
        load(monkeypatch, "--config", str(tmp_path / "none.toml"))


def test_a_file_that_is_no_toml_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text('max_waiting = "x\n')
    with pytest.raises(SystemExit, match=r"tandem\.toml is no TOML: .*line 1"):
        load(monkeypatch, "--config", str(file))


def test_switches_take_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, "--reflection").reflection
    assert not load(monkeypatch, "--no-reflection").reflection


def test_a_variable_of_another_program_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, TANDEM_MODEL="somewhere", TANDEM_ADDRESS="127.0.0.1:1").max_waiting == 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [("max-waiting", "0"), ("frontends", "0"), ("frontends", "65"), ("grace-seconds", "-1"), ("log-level", "loud")],
)
def test_a_value_out_of_bounds_names_the_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    with pytest.raises(SystemExit, match=name.replace("-", "_") + f".*{re.escape(value)}"):
        load(monkeypatch, f"--{name}={value}")


def test_the_runtime_folder_is_ours_alone_and_held_once(tmp_path: Path) -> None:
    folder = RuntimeDir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert folder.worker_endpoint == f"ipc://{tmp_path}/run/worker.sock"
    with pytest.raises(SystemExit, match="another scheduler holds"):
        RuntimeDir(tmp_path / "run")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SystemExit, match="has mode 0755; it must be 0700"):
        RuntimeDir(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(SystemExit, match="no folder of this user's"):
        RuntimeDir(tmp_path / "link")
    with pytest.raises(SystemExit, match="the limit is 107"):
        RuntimeDir(tmp_path / ("x" * 120))


def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scheduler_svc", "--runtime-dir", str(tmp_path / "run"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_taken_port_ends_the_service_with_the_address(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(tmp_path, "--listen", address)
    assert done.returncode != 0
    assert address in done.stderr


@pytest.mark.parametrize("count", ["1", "2"])
def test_an_address_that_others_reach_is_refused(tmp_path: Path, count: str) -> None:
    done = run(tmp_path, "--listen", "0.0.0.0:0", "--frontends", count)
    assert done.returncode != 0
    assert "loopback" in done.stderr
    assert done.stderr.count("Traceback") == 0
