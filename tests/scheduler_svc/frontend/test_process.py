"""The process: its lines on stdout, exit codes, signals and size, and its end with its parent."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.door.tls_files import TlsFiles
from scheduler_svc.frontend import __main__
from scheduler_svc.processes.address import ListenError, split
from scheduler_svc.processes.frontends import FrontEndSettings
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.fake_core import FakeCore, Service, rest
from tests.scheduler_svc.frontend.tokenizers_for_tests import spell

ROOT = Path(__file__).parents[3]
READY = "frontend listening on "


# Its settings are in its stdin.
COMMAND = [sys.executable, "-m", "scheduler_svc.frontend", "0"]


@contextmanager
def settings(tmp_path: Path, listen: str = "127.0.0.1:0", *, wrong: str = "", **others: Any) -> Iterator[IO[bytes]]:
    """A file with the settings of a front end."""
    made = FrontEndSettings(
        endpoint=f"ipc://{tmp_path}/core.sock", listen=listen, max_message_bytes=4 << 20, grace_seconds=5.0, **others
    )
    (tmp_path / "settings").write_bytes(made.encoded() + wrong.encode())
    with (tmp_path / "settings").open("rb") as file:
        yield file


@contextmanager
def front_end(tmp_path: Path, **others: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A front end in its own process, and its address."""
    with (
        settings(tmp_path, **others) as file,
        subprocess.Popen(COMMAND, cwd=ROOT, stdin=file, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(READY)
            yield process, line.removeprefix(READY).strip()
        finally:
            process.kill()


def refused(tmp_path: Path, listen: str = "127.0.0.1:0", *, wrong: str = "") -> str:
    """The line that says why a front end does not start. Nothing else is printed, not even by gRPC."""
    with settings(tmp_path, listen, wrong=wrong) as file:
        finished = subprocess.run(
            COMMAND, cwd=ROOT, stdin=file, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    assert finished.returncode == 2
    assert finished.stderr == ""
    [line] = finished.stdout.splitlines()
    assert line.startswith("frontend failed: ")
    return line


async def test_the_process_serves_a_stream_and_completes_it_after_sigterm(tmp_path: Path) -> None:
    core = FakeCore(f"ipc://{tmp_path}/core.sock")
    with front_end(tmp_path, reflection=True) as (process, address):
        await core.greet()
        s = Service(core, address, None)
        watch = health_pb2_grpc.HealthStub(s.channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        call, submit = await s.start_stream()
        assert psutil.Process(process.pid).memory_info().rss < 120e6
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "frontend alive\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await core.output(submit.stream, spell(b"ab"), "LENGTH")
        assert [kind for kind, _ in await rest(call)] == ["delta", "finished", "summary"]
        assert await asyncio.to_thread(process.wait, 10) == 0
        watch.cancel()
        await s.channel.close()
    core.close()


async def test_the_process_stops_when_its_parent_no_longer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(__main__, "ALIVE_SECONDS", 0.001)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        is_over = asyncio.Event()
        saying = asyncio.create_task(__main__.say_alive(is_over.set))
        assert await asyncio.to_thread(os.read, reading, 15) == b"frontend alive\n"
        assert not is_over.is_set()
        os.close(reading)
        await asyncio.wait_for(is_over.wait(), TIMEOUT_SECONDS)
        await saying
        # Accepts the lines that are written when the descriptor is closed.
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), writing)


def test_the_failure_line_ends_with_the_taken_port(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(tmp_path, address)
    assert line.endswith(f"cannot listen on {address}")
    assert "--listen" in line


def test_settings_of_another_version_are_refused(tmp_path: Path):
    """A newer program may lie where this one was started."""
    assert "settings are not those of this version" in refused(tmp_path, wrong="}")


FULL = FrontEndSettings(
    endpoint="ipc:///tmp/ä/core.sock", listen="[::1]:1", max_message_bytes=1 << 20, grace_seconds=0.5,
    name="frontend-2", share_port=True, needs_tokens=True, health_listen="0.0.0.0:2", measures=True, reflection=True,
    tls=TlsFiles(certificate=Path("c.pem"), key=Path(os.fsdecode(b"/k\xff.pem"))), max_streams=7, log_level="debug",
    log_format="json", log_requests="address", grpc_tuning="off", flight_dir=Path("/f"),
    response_template=Path("/r.json"), secret=b"s" * 32,
)  # fmt: skip


def test_settings_come_as_they_were_given():
    assert FrontEndSettings.decoded(FULL.encoded()) == FULL
    changed = {each.name for each in fields(FULL) if getattr(FULL, each.name) != each.default}
    assert changed == {each.name for each in fields(FULL)}, "the test gives each setting another value than its default"


@pytest.mark.parametrize("name", [each.name for each in fields(FULL)])
def test_a_setting_of_another_type_or_none_is_refused_and_not_shown(name: str):
    """Also a truth where a number is due."""
    given = json.loads(FULL.encoded())
    wrong = "notatruth" if isinstance(given[name], bool) else True
    for settings in ({**given, name: wrong}, {each: given[each] for each in given if each != name}):
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            FrontEndSettings.decoded(json.dumps(settings).encode())
        assert "notatruth" not in str(caught.value)


@pytest.mark.parametrize(
    ("listens", "why"),
    [
        (["0.0.0.0:50051", "[::]:0", "192.0.2.1:1", "example.org:80"], "loopback addresses only"),
        (["127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:65536", "127.0.0.1:-1", "a:b:c"], "it must be HOST:PORT"),
        (["::1:50051"], r"write \[::1\]:50051$"),
        (["2001:db8::5", "[::1:50051", "::1]:50051"], r"needs brackets: write \["),
    ],
)
def test_only_addresses_of_loopback_are_accepted(listens: list[str], why: str):
    for listen in listens:
        with pytest.raises(ListenError, match=why) as caught:
            split(listen)
        assert listen in str(caught.value)


def test_the_process_ends_with_its_parent(tmp_path: Path):
    code = "import subprocess, sys; c = subprocess.Popen(sys.argv[1:]); print(c.pid, flush=True); c.wait()"
    with (
        settings(tmp_path) as file,
        subprocess.Popen(
            [sys.executable, "-c", code, *COMMAND], cwd=ROOT, stdin=file, stdout=subprocess.PIPE, text=True
        ) as parent,
    ):
        assert parent.stdout is not None
        lines = sorted([parent.stdout.readline(), parent.stdout.readline()])
        child = psutil.Process(int(lines[0]))
        assert lines[1].startswith(READY)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(TIMEOUT_SECONDS)
        # Another parent inherits the dead process, so it may remain as a zombie.
        psutil.wait_procs([child], timeout=TIMEOUT_SECONDS)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
