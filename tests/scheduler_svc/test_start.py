"""Start of the scheduler service: settings, the runtime folder, and addresses that cannot be used."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq

from scheduler_svc.processes.runtime_dir import RuntimeDir
from scheduler_svc.settings import PROGRAM
from scheduler_svc.shell.links import RouterLink
from tandem_contract.files import SOCKETS
from tandem_contract.settings import SettingError
from tests.rigs.processes import SchedulerProcess
from tests.rigs.waiting import TIMEOUT_SECONDS


def test_warnings_about_variables_are_lines_of_the_log(tmp_path: Path) -> None:
    # What a front end finds wrong ends the start after the log has begun.
    lines = said(tmp_path, "--response-template", str(tmp_path / "none"), environment={"TANDEM_MAX_WAITING": "5"})
    [line] = [line for line in lines if "TANDEM_MAX_WAITING" in line]
    what = "ignored TANDEM_MAX_WAITING: variables of this program begin with TANDEM_SCHEDULER_"
    assert line.endswith(f" core WARNING {what}")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max-waiting", "lots", "is 'lots'; it must be a whole number from 1 to 1,000,000"),
        ("frontends", "65", "is 65; it must be a whole number from 1 to 64"),
        ("grace-seconds", "-1", "is -1; it must be a number from 0 to 3,600"),
        ("step-timeout-seconds", "0", "is 0; it must be a number above 0 and at most 3,600"),
        ("max-worker-wait-seconds", "0.5", "is 0.5; it must be a number from 1 to 86,400"),
        ("log-level", "loud", "is 'loud'; it must be one of debug, info, warning, error"),
        ("weights-folders", "/a,b", "is '/a,b'; 'b' must be an absolute path without '..'"),
    ],
)
def test_a_refused_value_is_shown_with_its_bounds(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        PROGRAM.read([f"--{name}={value}"], {})
    assert str(caught.value) == f"--{name} {said}"


def test_the_runtime_folder_is_private_and_held_by_one_scheduler(tmp_path: Path) -> None:
    folder = RuntimeDir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert folder.worker_endpoint == f"ipc://{tmp_path}/run/worker.sock"
    with pytest.raises(SettingError, match=rf"another scheduler \(process {os.getpid()}\) holds"):
        RuntimeDir(tmp_path / "run")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SettingError, match="has mode 0755; it must be 0700"):
        RuntimeDir(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="file/run cannot be used: Not a directory"):
        RuntimeDir(tmp_path / "file" / "run")


def started(tmp_path: Path, *flags: str, environment: dict[str, str] | None = None) -> SchedulerProcess:
    # The default port may be that of a service that runs; later flags replace these.
    own = ["--runtime-dir", str(tmp_path / "run"), "--listen", "127.0.0.1:0"]
    return SchedulerProcess("scheduler", ["scheduler_svc", *own, *flags], environment=environment)


def said(tmp_path: Path, *flags: str, environment: dict[str, str] | None = None) -> list[str]:
    """The lines of a start that cannot succeed."""
    scheduler = started(tmp_path, *flags, environment=environment)
    assert scheduler.wait() == 2, scheduler.output()
    scheduler.join_output()
    return scheduler.lines


def test_a_start_that_cannot_succeed_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        taken_words, free = "the port is taken; choose another with", "(127.0.0.1:0 takes a free port)"
        refused = [
            (["--listen", address], f"listen: {taken_words} --listen {free}: cannot listen on {address}"),
            (["--listen", address, "--frontends", "2"], f"cannot listen on {address}"),
            (["--listen", "0.0.0.0:0"], "listen: --tls-cert, --tls-key and --tokens are missing: without TLS"),
            (["--tls-cert", "c.pem"], "--tls-cert is set, and --tls-key missing; TLS needs certificate and key"),
            (["--tls-client-ca", "c.pem"], "--tls-client-ca is set, and --tls-cert and --tls-key missing"),
            (["--tls-cert", "c.pem", "--tls-key", "k.pem"], "--tls-cert: c.pem cannot be read: No such file"),
            (["--tokens", "none.toml"], "none.toml cannot be read: No such file or directory"),
            (
                ["--listen", "127.0.0.1:0", "--health-listen", address],
                f"scheduler_svc: health_listen: {taken_words} --health-listen {free}: cannot listen on {address}",
            ),
            (
                ["--listen", "127.0.0.1:0", "--metrics-listen", address],
                f"scheduler_svc: metrics_listen: {taken_words} --metrics-listen {free}: cannot listen on {address}",
            ),
            (["--metrics-listen", "0.0.0.0:0"], "metrics_listen: --tls-cert, --tls-key and --tokens are missing"),
            (["--metrics-listen", "9100"], "scheduler_svc: metrics_listen: it is 9100; it must be HOST:PORT"),
            (["--listen", "here"], "scheduler_svc: listen: it is here; it must be HOST:PORT"),
            (["--max-waiting", "lots"], "--max-waiting is 'lots'"),
            (["--record", str(tmp_path)], "existing files are not overwritten, choose another name"),
            (["--steps", str(tmp_path / "no" / "steps")], "No such file or directory"),
        ]
        for flags, cause in refused:
            [line] = said(tmp_path, *flags)
            assert line.startswith("scheduler_svc: ")
            assert cause in line
    assert not list(tmp_path.glob("steps*"))


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere.sock")


@pytest.mark.parametrize("name", SOCKETS)
@pytest.mark.parametrize(
    ("make", "what"),
    [(Path.mkdir, "a folder"), (Path.touch, "a file"), (_link, "a link"), (os.mkfifo, "something else")],
)
def test_what_has_the_name_of_a_socket_is_said_and_left(
    tmp_path: Path, name: str, make: Callable[[Path], object], what: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    make(folder / name)
    with pytest.raises(SettingError) as caught:
        RuntimeDir(folder)
    said = f"{folder}/{name} is {what} and must be a socket: remove it, or choose another runtime_dir"
    assert str(caught.value) == said
    assert os.path.lexists(folder / name)


def test_the_socket_of_a_dead_scheduler_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "worker.sock"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = RouterLink(context, RuntimeDir(folder).worker_endpoint, max_frame_bytes=1)
    link.close()
    context.term()


NOT_UTF8 = os.fsdecode(b"\xff\xfe")


def test_a_runtime_folder_that_is_not_utf8_is_refused_with_its_name(tmp_path: Path) -> None:
    assert said(tmp_path, "--runtime-dir", str(tmp_path / NOT_UTF8)) == [
        f"scheduler_svc: runtime_dir {tmp_path}/\\udcff\\udcfe is not UTF-8, and addresses of sockets must be"
    ]


def test_an_endpoint_that_cannot_be_encoded_leaves_no_socket_open(tmp_path: Path) -> None:
    """The context would wait for it, and the start hang without a line."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(UnicodeEncodeError):
        RouterLink(context, f"ipc://{tmp_path}/{NOT_UTF8}", max_frame_bytes=1)

    def configure(_: zmq.Socket[bytes]) -> None:
        raise KeyError("any error")

    with pytest.raises(KeyError):
        RouterLink(context, f"ipc://{tmp_path}/a.sock", max_frame_bytes=1, configure=configure)
    context.term()


def test_other_paths_that_are_not_utf8_work(tmp_path: Path) -> None:
    for name in ("journal", "record", "steps", "flight"):
        (tmp_path / name).mkdir(mode=0o700)
    path = {name: str(tmp_path / name / NOT_UTF8) for name in ("journal", "record", "steps", "flight")}
    flags = [f"--{name.replace('flight', 'flight-dir')}={where}" for name, where in path.items()]
    scheduler = started(tmp_path, *flags)
    assert scheduler.address
    assert scheduler.terminate() == 0
    assert all(os.path.exists(each) for name, each in path.items())
    assert os.path.exists(f"{path['journal']}/journal")


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
