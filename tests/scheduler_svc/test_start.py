"""Start of the scheduler service: settings, the runtime folder, and addresses that cannot be used."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduler_svc import settings
from scheduler_svc.flags import SettingError
from scheduler_svc.processes.runtime_dir import RuntimeDir
from tandem_contract.version import version
from tests.rigs.waiting import TIMEOUT_SECONDS


def load(monkeypatch: pytest.MonkeyPatch, *flags: str, **variables: str) -> settings.SchedulerSettings:
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return settings.load(list(flags))


def test_flags_beat_the_environment_which_beats_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("max_waiting = 1\ngrace_seconds = 1\ndefault_max_new_tokens = 1\n")
    settings = load(
        monkeypatch, "--config", str(file), "--max-waiting", "3",
        TANDEM_SCHEDULER_MAX_WAITING="2", TANDEM_SCHEDULER_GRACE_SECONDS="2",
    )  # fmt: skip
    assert (settings.max_waiting, settings.grace_seconds, settings.default_max_new_tokens) == (3, 2.0, 1)
    by_variable = load(monkeypatch, TANDEM_SCHEDULER_CONFIG=str(file))
    assert by_variable.max_waiting == 1


def refusal(monkeypatch: pytest.MonkeyPatch, *flags: str, **variables: str) -> str:
    with pytest.raises(SettingError) as caught:
        load(monkeypatch, *flags, **variables)
    return str(caught.value)


def test_unknown_names_are_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusal(monkeypatch, TANDEM_SCHEDULER_MAX_WAITNG="2", TANDEM_SCHEDULER_QQ="") == (
        "there is no environment variable TANDEM_SCHEDULER_MAX_WAITNG; did you mean TANDEM_SCHEDULER_MAX_WAITING?\n"
        "there is no environment variable TANDEM_SCHEDULER_QQ (--help lists them)"
    )
    file = tmp_path / "tandem.toml"
    file.write_text("max_waitng = 1\n")
    named = "there is no setting max_waitng; did you mean max_waiting?"
    assert refusal(monkeypatch, "--config", str(file)) == named
    assert refusal(monkeypatch, "--max-waitng", "1") == "there is no flag --max-waitng; did you mean --max-waiting?"
    assert "there is no flag --qq" in refusal(monkeypatch, "--qq")
    assert "none.toml does not exist" in refusal(monkeypatch, "--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("content", [b'max_waiting = "x\n', b"\xff\xfe"])
def test_a_config_file_that_is_not_toml_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "tandem.toml"
    file.write_bytes(content)
    assert "tandem.toml is not TOML: " in refusal(monkeypatch, "--config", str(file))


def test_switches_take_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, "--reflection").reflection
    assert not load(monkeypatch, "--no-reflection").reflection


def test_variables_of_other_programs_change_nothing_and_give_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TANDEM_WORKER_MODEL": "m", "TANDEM_ADDRESS": "127.0.0.1:1", "TANDEM_SCHEDULER_MAX_WAITING": ""}
    assert load(monkeypatch, **variables).max_waiting == 1024
    assert settings.variable_warnings(variables) == []


def test_a_shared_variable_sets_both_programs_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TANDEM_RUNTIME_DIR": "/run/tandem", "TANDEM_LOG_FORMAT": "json", "TANDEM_LOG_LEVEL": "error"}
    shared = load(monkeypatch, **variables)
    assert (str(shared.runtime_dir), shared.log_format, shared.log_level) == ("/run/tandem", "json", "error")
    assert settings.variable_warnings(variables) == []
    assert load(monkeypatch, **variables, TANDEM_SCHEDULER_LOG_LEVEL="debug").log_level == "debug"


def test_names_without_a_program_are_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the service's own settings."""
    variables = {"TANDEM_MAX_WAITING": "5", "TANDEM_MAX_ROWS": "3", "TANDEM_RECORD": ""}
    assert load(monkeypatch, **variables).max_waiting == 1024
    assert settings.variable_warnings(variables) == [
        "ignored TANDEM_MAX_ROWS, TANDEM_MAX_WAITING: variables of this program begin with TANDEM_SCHEDULER_"
    ]


def test_warnings_about_variables_are_lines_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "run" / "worker.sock").mkdir(parents=True)
    (tmp_path / "run").chmod(0o700)
    done = run(tmp_path, env={**os.environ, "TANDEM_MAX_WAITING": "5"})
    [line] = [line for line in done.stderr.splitlines() if "TANDEM_MAX_WAITING" in line]
    assert line.endswith(
        " core WARNING ignored TANDEM_MAX_WAITING: variables of this program begin with TANDEM_SCHEDULER_"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max-waiting", "lots", "max_waiting is 'lots'; it must be a whole number from 1 to 1,000,000"),
        ("max-waiting", "0", "max_waiting is 0; it must be a whole number from 1 to 1,000,000"),
        ("max-waiting", "1.5", "max_waiting is 1.5; it must be a whole number from 1 to 1,000,000"),
        ("frontends", "65", "frontends is 65; it must be a whole number from 1 to 64"),
        ("grace-seconds", "-1", "grace_seconds is -1; it must be a number from 0 to 3,600"),
        ("grace-seconds", "nan", "grace_seconds is nan; it must be a number from 0 to 3,600"),
        ("step-timeout-seconds", "0", "step_timeout_seconds is 0; it must be a number above 0 and at most 3,600"),
        ("max-worker-wait-seconds", "0.5", "max_worker_wait_seconds is 0.5; it must be a number from 1 to 86,400"),
        ("log-level", "loud", "log_level is 'loud'; it must be one of debug, info, warning, error"),
        ("log-format", "xml", "log_format is 'xml'; it must be one of text, json"),
    ],
)
def test_a_refused_value_is_shown_with_its_bounds(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    assert refusal(monkeypatch, f"--{name}={value}") == said
    assert refusal(monkeypatch, **{f"TANDEM_SCHEDULER_{name.upper().replace('-', '_')}": value}) == said


def test_a_file_with_values_of_wrong_types_is_refused_line_by_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("listen = 5\nreflection = 'perhaps'\nsteps = 1\n")
    assert set(refusal(monkeypatch, "--config", str(file)).splitlines()) == {
        "listen is 5; it must be text",
        "steps is 1; it must be a path",
        "reflection is 'perhaps'; it must be true or false",
    }


def test_help_shows_each_default_once_and_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(monkeypatch, "--help")
    said = " ".join(capsys.readouterr().out.split())
    for name in settings.SchedulerSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in said
    assert "(default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>)" in said
    assert not [word for word in ("factory", "None", "False", "float", "default default") if word in said]


def test_the_runtime_folder_is_private_and_held_by_one_scheduler(tmp_path: Path) -> None:
    folder = RuntimeDir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert folder.worker_endpoint == f"ipc://{tmp_path}/run/worker.sock"
    with pytest.raises(SettingError, match="another scheduler holds"):
        RuntimeDir(tmp_path / "run")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SettingError, match="has mode 0755; it must be 0700"):
        RuntimeDir(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(SettingError, match="is a link; it must be a folder"):
        RuntimeDir(tmp_path / "link")
    with pytest.raises(SettingError, match="the limit is 107"):
        RuntimeDir(tmp_path / ("x" * 120))
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="file/run cannot be used: Not a directory"):
        RuntimeDir(tmp_path / "file" / "run")


def run(tmp_path: Path, *flags: str, **options: Any) -> subprocess.CompletedProcess[str]:
    # The default port may be that of a service that runs; later flags replace these.
    own = ["--runtime-dir", str(tmp_path / "run"), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "scheduler_svc", *own, *flags]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS, check=False, **options)


def test_a_start_that_cannot_succeed_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = [
            (["--listen", address], f"cannot listen on {address}"),
            (["--listen", address, "--frontends", "2"], f"cannot listen on {address}"),
            (
                ["--listen", "0.0.0.0:0"],
                "listen: --tls-cert, --tls-key and --tokens are missing: without TLS",
            ),
            (["--tls-cert", "c.pem"], "--tls-cert is set, and --tls-key missing; TLS needs certificate and key"),
            (["--tls-client-ca", "c.pem"], "--tls-client-ca is set, and --tls-cert and --tls-key missing"),
            (["--tls-cert", "c.pem", "--tls-key", "k.pem"], "--tls-cert: c.pem cannot be read: No such file"),
            (["--tokens", "none.toml"], "none.toml cannot be read: No such file or directory"),
            (["--listen", "127.0.0.1:0", "--health-listen", address], "choose another with --health-listen"),
            (["--listen", "127.0.0.1:0", "--metrics-listen", address], "choose another with --metrics-listen"),
            (["--metrics-listen", "0.0.0.0:0"], "--tls-cert, --tls-key and --tokens are missing: without TLS"),
            (["--metrics-listen", "9100"], "it must be HOST:PORT"),
            (["--listen", "here"], "listen is here; it must be HOST:PORT"),
            (["--max-waiting", "lots"], "max_waiting is 'lots'"),
            (["--record", str(tmp_path)], "existing files are not overwritten, choose another name"),
            (["--steps", str(tmp_path / "no" / "steps")], "No such file or directory"),
        ]
        for flags, cause in refused:
            done = run(tmp_path, *flags)
            assert done.returncode == 2, done.stderr
            [line] = done.stderr.splitlines()
            assert line.startswith("scheduler_svc: ")
            assert cause in line
    assert not list(tmp_path.glob("steps*"))


def test_a_socket_that_cannot_be_created_ends_the_start_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "worker.sock").mkdir()
    done = run(tmp_path, "--runtime-dir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert f"the socket {tmp_path}/run/worker.sock cannot be created: Address already in use" in done.stderr


def test_version_prints_the_version_of_the_distribution(tmp_path: Path) -> None:
    done = run(tmp_path, "--version", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tandem {version()}\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of the parent")
def test_exit_with_parent_ends_the_service_with_its_parent(tmp_path: Path) -> None:
    starter = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    command = [sys.executable, "-m", "scheduler_svc", "--runtime-dir", str(tmp_path / "run"), "--exit-with-parent"]
    with subprocess.Popen(
        [sys.executable, "-c", starter, *command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stderr is not None
        while "frontend listening on" not in parent.stderr.readline():
            pass
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 2
        parent.kill()
        _, alive = psutil.wait_procs(family, timeout=TIMEOUT_SECONDS)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
