"""The command line of the cluster's commands, and the command of a worker: what needs no Ray."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.cluster import __main__ as program
from gpu_worker.cluster.__main__ import environment, parse, start_head, use_token
from gpu_worker.cluster.fleet import ClusterFailed, Fleet, Sized
from tandem_contract.version import how_to_install
from tests.architecture.source import ROOT

UP = ("up", "--connect", "tcp://scheduler:50060", "--keys", "/etc/tandem/gpu")


def fleet(*arguments: str) -> Fleet:
    _, found = parse([*UP, *arguments])
    assert isinstance(found, Fleet)
    return found


def test_a_worker_gets_the_address_the_folder_of_its_keys_and_its_own_flags() -> None:
    found = fleet("--workers", "3", "--", "--model", "/models/x", "--device", "cuda")
    assert found.command() == (
        *(sys.executable, "-P", "-m", "gpu_worker", "--connect", "tcp://scheduler:50060", "--keys", "/etc/tandem/gpu"),
        *("--exit-with-parent", "--model", "/models/x", "--device", "cuda"),
    )
    assert found.workers == 3 and found.resources() == {"CPU": 1, "GPU": 1}


def test_a_group_is_on_one_node_and_one_process_that_starts_its_ranks() -> None:
    found = fleet("--ranks", "4", "--cpus", "8", "--", "--device=cuda")
    assert found.resources() == {"CPU": 8, "GPU": 4}
    command = found.command()
    assert command[1:4] == ("-P", "-m", "gpu_worker") and "--exit-with-parent" in command
    assert command[command.index("--ranks") + 1] == "4"


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ((), 1),
        (("--", "--device", "cpu"), 0),
        (("--gpus", "2", "--", "--device", "cuda"), 2),
        (("--ranks", "2", "--", "--device", "cpu"), 0),
    ],
)
def test_gpus_follow_the_device(flags: tuple[str, ...], gpus: int) -> None:
    assert fleet(*flags).gpus == gpus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*UP[:1],), "connect is ; it must be tcp://HOST:PORT"),
        (UP[:3], "keys is ; it must be an absolute path"),
        ((*UP, "--workers", "0"), "--workers is 0; it must be a whole number from 1 to 1,024"),
        ((*UP, "--wrokers", "2"), "there is no flag --wrokers; did you mean --workers?"),
        ((*UP, "--name", "a b"), "--name is 'a b'; it must match ^[A-Za-z0-9]"),
        ((*UP, "--name", "-"), "--name is '-'"),
        ((*UP, "--", "--modle", "x"), "there is no flag --modle; did you mean --model?"),
        ((*UP, "--", "--max-rows", "0"), "--max-rows is 0; it must be a whole number, at least 1"),
        ((*UP, "--", "--connect", "tcp://x:1"), "--connect is a flag of `up`; give it before the --"),
        ((*UP, "--", "--keys=/x"), "--keys is a flag of `up`"),
        ((*UP, "--", "--device", "cuda:1"), "device is cuda:1; Ray gives each worker GPUs of its own"),
        (("up", "--connect", "ipc://x", "--keys", "/k"), "connect is ipc://x; it must be tcp://HOST:PORT"),
        (("up", "--connect", "tcp://x:1", "--keys", "keys"), "keys is keys; it must be an absolute path"),
        (("down", "--", "--model", "x"), "down takes no flags of the worker"),
        (("scale",), "--workers has no value; it must be a whole number from 1 to 1,024"),
        (("scale", "1", "2"), "there is no flag 2"),
        (("scale", "1025"), "--workers is 1025; it must be a whole number from 1 to 1,024"),
        (("head", "--port", "70000"), "--port is 70000; it must be a whole number from 1 to 65,535"),
        (("grow",), "there is no command grow; it must be one of head, up, status, scale, retry, down"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == 2
    output = capsys.readouterr().err
    assert message in output and output.startswith("gpu_worker.cluster: ") and output.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("6", "--name", "x"), ("--name", "x", "6"), ("--name=x", "6"), ("--name", "x", "6", "--wait-seconds", "1")],
)
def test_the_number_of_workers_stands_anywhere(arguments: tuple[str, ...]) -> None:
    _, asked = parse(["scale", *arguments])
    assert isinstance(asked, Sized) and (asked.workers, asked.name) == (6, "x")


@pytest.mark.parametrize("command", [(), ("up",), ("scale",), ("status",), ("head",)])
def test_help_lists_commands_and_their_flags(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*command, "--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in (command or ("up", "retry", "scale N")))
    assert ("--workers N" in shown) == (command in [("up",), ("scale",)])


def test_a_fleet_has_no_key() -> None:
    values = fleet("--", "--device", "cpu").model_dump().values()
    assert all(isinstance(value, str | int | tuple | None) for value in values)


def test_without_ray_the_command_says_what_to_install() -> None:
    """In an interpreter of its own, so that an installed Ray does not count."""
    hide = "import sys; sys.modules['ray'] = None; from gpu_worker.cluster.__main__ import main; "
    code = f"{hide}sys.exit(main(['status']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr == (f"gpu_worker.cluster: it needs Ray: {how_to_install('ray')}, on every node of the cluster\n")


def test_help_and_arguments_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from gpu_worker.cluster import __main__, fleet; "
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_the_head_checks_its_nodes_often_and_asks_for_a_token() -> None:
    variables = environment({"HOME": "/root", "RAY_health_check_period_ms": "900"})
    assert variables["RAY_health_check_failure_threshold"] == "3"
    assert variables["RAY_health_check_period_ms"] == "900", "what the user has set stays"
    assert variables["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("fails", [False, True])
def test_the_head_is_rays_own_command_with_a_token(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "said of $1"\necho "$RAY_AUTH_MODE $*" >> {tmp_path}/calls\nexit {int(fails)}\n')
    ray.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if fails:
        with pytest.raises(ClusterFailed, match=r"^`ray get-auth-token --generate` failed with exit code 1$"):
            start_head(6380, os.environ)
        return
    assert start_head(6380, os.environ) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "token get-auth-token --generate"
    assert calls[1].startswith("token start --head --port=6380 ") and len(calls) == 2
    shown = capfd.readouterr().out
    assert "RAY_AUTH_MODE=token RAY_gcs_rpc_server_reconnect_timeout_s=3600" in shown
    # The first of them says the token.
    assert "said of start" in shown and "said of get-auth-token" not in shown


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterFailed, match=f"port {port} is in use"):
            start_head(port, os.environ)


def test_a_token_of_this_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    variables: dict[str, str] = {}
    use_token(variables)
    assert variables == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    use_token(variables)
    assert variables == {"RAY_AUTH_MODE": "token"}
    variables = {"RAY_AUTH_MODE": "disabled"}
    use_token(variables)
    assert variables == {"RAY_AUTH_MODE": "disabled"}


def test_ray_is_imported_by_one_module() -> None:
    folder = ROOT / "gpu_worker"
    found = [path for path in folder.rglob("*.py") if "\nimport ray" in path.read_text()]
    assert found == [folder / "cluster" / "ray_workers.py"]
    assert Path(program.__file__).parent == folder / "cluster"
