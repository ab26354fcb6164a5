"""The command line of the cluster's commands, and the command of a worker: what needs no Ray."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.cluster import __main__ as program
from gpu_worker.cluster.arguments import fleet_of_flags, parse
from gpu_worker.cluster.fleet import Fleet, FleetRefused
from gpu_worker.cluster.head import HeadFailed, environment, head_command, node_hint, start_head, use_token
from tests.architecture.source import ROOT

UP = ("up", "--connect", "tcp://scheduler:50060", "--keys", "/etc/tandem/gpu")


def fleet(*arguments: str) -> Fleet:
    return fleet_of_flags(parse([*UP, *arguments]))


def test_a_worker_gets_the_address_the_folder_of_its_keys_and_its_own_flags() -> None:
    found = fleet("--workers", "3", "--", "--model", "/models/x", "--device", "cuda")
    assert found.command("/python") == [
        *("/python", "-P", "-m", "gpu_worker", "--connect", "tcp://scheduler:50060", "--keys", "/etc/tandem/gpu"),
        *("--exit-with-parent", "--model", "/models/x", "--device", "cuda"),
    ]
    assert found.bundle() == {"CPU": 1.0, "GPU": 1.0}


def test_a_group_is_one_bundle_and_one_process_that_starts_its_ranks() -> None:
    found = fleet("--ranks", "4", "--cpus", "8", "--", "--device=cuda")
    assert found.bundle() == {"CPU": 8.0, "GPU": 4.0}
    command = found.command("/python")
    assert command[:4] == ["/python", "-P", "-m", "gpu_worker"] and "--exit-with-parent" in command
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
        ((*UP[:1],), "the following arguments are required: --connect, --keys"),
        ((*UP, "--workers", "0"), "argument --workers: is 0; it must be a whole number from 1 to 1024"),
        ((*UP, "--wrokers", "2"), "unrecognized arguments: --wrokers 2"),
        ((*UP, "--name", "a b"), "name is 'a b'"),
        ((*UP, "--", "--modle", "x"), "the worker's settings: there is no flag --modle; did you mean --model?"),
        ((*UP, "--", "--max-rows", "0"), "--max-rows is 0; it must be a whole number, at least 1"),
        ((*UP, "--", "--connect", "tcp://x:1"), "--connect is a flag of `up`; give it before the --"),
        ((*UP, "--", "--keys=/x"), "--keys is a flag of `up`"),
        ((*UP, "--", "--device", "cuda:1"), "device is cuda:1; Ray gives each worker GPUs of its own"),
        (("up", "--connect", "ipc://x", "--keys", "/k"), "connect is ipc://x; it must be tcp://HOST:PORT"),
        (("up", "--connect", "tcp://x:1", "--keys", "keys"), "keys is keys; it must be an absolute path"),
        (("down", "--", "--model", "x"), "down takes no flags of the worker"),
        (("scale",), "the following arguments are required: N"),
        (("scale", "1025"), "argument N: is 1025; it must be a whole number from 1 to 1024"),
        (("head", "--port", "70000"), "argument --port: is 70000; it must be a whole number from 1 to 65535"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == 2
    output = capsys.readouterr().err
    assert message in output and output.startswith("gpu_worker.cluster: ") and output.count("\n") == 1


def test_a_fleet_travels_as_plain_values_without_a_key() -> None:
    found = fleet("--", "--device", "cpu")
    plain = found.plain()
    assert Fleet.of_plain(plain) == found
    assert all(isinstance(value, str | int | list) for value in plain.values())


def test_the_name_of_a_fleet_is_its_namespace() -> None:
    assert fleet("--name", "blue").namespace == "tandem-blue"
    with pytest.raises(FleetRefused, match="letters, digits"):
        fleet("--name", "-")


def test_without_ray_the_command_says_what_to_install() -> None:
    """In an interpreter of its own, so that an installed Ray does not count."""
    hide = "import sys; sys.modules['ray'] = None; from gpu_worker.cluster.__main__ import main; "
    code = f"{hide}sys.exit(main(['status']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "gpu_worker.cluster: it needs Ray: pip install 'tandem-inference[ray]', on every node of the cluster\n"
    )


def test_help_and_arguments_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from gpu_worker.cluster import __main__, supervisor, capacity, head; "
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_the_head_checks_its_nodes_often_and_asks_for_a_token() -> None:
    variables = environment({"HOME": "/root", "RAY_health_check_period_ms": "900"})
    assert variables["RAY_health_check_failure_threshold"] == "3"
    assert variables["RAY_health_check_period_ms"] == "900", "what the user has set stays"
    assert variables["RAY_AUTH_MODE"] == "token"
    assert head_command("/bin/ray", 6380)[:4] == ["/bin/ray", "start", "--head", "--port=6380"]
    assert "RAY_AUTH_MODE=token" in node_hint("head:6380") and node_hint("head:6380").endswith("--address=head:6380")


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(HeadFailed, match=f"port {port} is in use"):
            start_head(port)


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
