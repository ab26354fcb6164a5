"""A process that was forked with its imports done is as one that was started."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from json import loads
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.client.gateway.conftest import gateway_with
from tests.rigs.preloaded import Popen, Server, kind_of
from tests.rigs.processes import REPOSITORY, Child, Rig, child_environment
from tests.rigs.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks for Linux")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def server() -> Server:
    return Server(child_environment(), REPOSITORY)


@pytest.fixture
def starts(server: Server) -> list[Start]:
    """The ordinary start, and the fork."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    given |= {"cwd": REPOSITORY, "text": True}

    def command(words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "tests.rigs.self_report", *words]

    def ordinary(*words: str, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(command(words), **given | options)

    def fork(*words: str, **options: Any) -> "subprocess.Popen[str]":
        return Popen(server, command(words), **given | options)

    return [ordinary, fork]


def test_it_has_what_a_start_gives_it(starts: list[Start], tmp_path: Path) -> None:
    environment = child_environment() | {"TANDEM_GERÄT": "ö =\n"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "more"), environment["PYTHONPATH"]])
    del environment["PATH"]
    reading, writing = os.pipe()
    try:
        found = []
        for start in starts:
            words = ("0", "--flag", "two words, ä", "")
            with start(*words, env=environment, cwd=tmp_path, pass_fds=(writing,)) as process:
                assert process.stdout is not None
                found.append(loads(process.stdout.read()))
                assert found[-1]["other"][0] == process.pid
            assert process.returncode == 0
    finally:
        os.close(reading)
        os.close(writing)
    ordinary, fork = found
    assert fork["same"] == ordinary["same"]
    assert fork["same"]["descriptors"] == [0, 1, 2, writing]


def test_two_forks_draw_other_random_numbers(starts: list[Start]) -> None:
    found = []
    for _ in range(2):
        output, _ = starts[1]("0", env=child_environment()).communicate()
        found.append(loads(output)["other"])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        *[("returns", 0), ("0", 0), ("3", 3), ("300", 300 % 256), ("-1", 255)],
        *[("raises", 1), ("says why", 1), ("leaves a thread", 0), ("logs", 0)],
    ],
)
def test_it_ends_with_the_code_and_the_last_lines_of_a_start(starts: list[Start], how: str, code: int) -> None:
    for start in starts:
        process = start(how, env=child_environment())
        output, _ = process.communicate()
        assert process.returncode == code
        assert ("Traceback" in output) == (how == "raises")
        assert output.endswith("the last line\n") == (how in {"says why", "leaves a thread", "logs"})


def test_nobody_else_closes_its_files_at_its_end(starts: list[Start]) -> None:
    for start in starts:
        output, _ = start("keeps files", env=child_environment()).communicate()
        assert output.splitlines()[1] == "[]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_it_ends_by_a_signal_as_a_start_does(starts: list[Start], number: signal.Signals) -> None:
    codes = []
    for start in starts:
        process = start("waits", env=child_environment())
        assert process.stdout is not None
        until(lambda process=process: process.stdout.readline() == "waits\n")
        assert process.poll() is None
        process.send_signal(number)
        process.communicate()
        assert not psutil.pid_exists(process.pid)
        codes.append(process.returncode)
    assert codes == [-number, -number]


def test_other_variables_that_modules_may_read_at_their_import_ask_for_a_start(server: Server) -> None:
    environment = child_environment()
    assert server.can_fork(environment | {"TANDEM_LISTEN": "127.0.0.1:0", "PYTEST_CURRENT_TEST": "this"})
    assert not server.can_fork(environment | {"OMP_NUM_THREADS": "17"})
    assert not server.can_fork({name: value for name, value in environment.items() if name != "PATH"})


@pytest.fixture(scope="module")
def compiled() -> None:
    """As Inductor does where a fixture of several tests compiles."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = "17"


@pytest.mark.usefixtures("compiled")
def test_a_service_and_its_front_ends_are_forks() -> None:
    with Rig() as rig:
        scheduler = rig.scheduler("--frontends", "2")
        front_ends = psutil.Process(scheduler.pid).children()
        assert len(front_ends) == 2
        for each in front_ends:
            assert "scheduler_svc.frontend" in each.cmdline()
        assert all(map(is_fork, (scheduler.pid, *(each.pid for each in front_ends))))


def test_a_gateway_and_its_processes_are_forks() -> None:
    with gateway_with("--address", "127.0.0.1:1", "--processes", "2") as (gateway, _):
        children = psutil.Process(gateway.pid).children()
        assert len(children) == 2 and all(map(is_fork, (gateway.pid, *(each.pid for each in children))))


def is_fork(pid: int) -> bool:
    """Whether the process has room for longer arguments than its own."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(bytes(100))


def test_a_worker_on_a_cpu_is_a_fork() -> None:
    assert kind_of(["gpu_worker", "--device", "cpu"]) == "with torch"
    assert (
        kind_of(["gpu_worker", "--ranks=2"]) == kind_of(["gpu_worker", "--fused-layers", "on"]) == "with the compiler"
    )
    assert kind_of(["gpu_worker.cluster"]) is None
    with Rig() as rig:
        flags = "--device cpu --num-pages 32 --page-size 16 --max-rows 2 --max-length 64 --token-budget 66"
        worker = Child("worker", ["gpu_worker", "--runtime-dir", str(rig.runtime_dir), *flags.split()])
        rig.children.append(worker)
        worker.wait_line("waiting for a scheduler")
        assert is_fork(worker.pid)
