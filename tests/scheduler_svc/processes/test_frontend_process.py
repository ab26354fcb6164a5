"""Front ends as child processes: when one is replaced, what it inherits, and what is logged when it ends."""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduler_svc.processes import frontends
from scheduler_svc.processes.address import ListenError
from scheduler_svc.processes.frontends import FrontendFailed, FrontendProcesses, FrontEndSettings
from tests.rigs.descriptors import open_descriptors, opened_since
from tests.rigs.processes import forking
from tests.rigs.waiting import TIMEOUT_SECONDS, until

READY = "frontend listening on "


class Bench:
    """Front ends without a core, and the log lines about them."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self._settings = FrontEndSettings(
            endpoint=f"ipc://{folder}/core.sock", listen="127.0.0.1:0", max_message_bytes=4 << 20, grace_seconds=30.0,
            log_level="error",
        )  # fmt: skip
        self._caplog = caplog
        self._all: list[FrontendProcesses] = []

    def of(self, count: int, *, silence_seconds: float = 60.0, **changed: Any) -> FrontendProcesses:
        settings = replace(self._settings, **changed)
        self._all.append(FrontendProcesses(count, settings, silence_seconds=silence_seconds))
        return self._all[-1]

    def script(self, *lines: str) -> None:
        """Replaces the program of front ends by a shell script."""
        path = self._folder / "front-end"
        path.write_text("\n".join(["#!/bin/sh", f'echo "{READY}127.0.0.1:1"', *lines]))
        path.chmod(0o700)
        self._patch.setattr(sys, "executable", str(path))

    def until_ready(self, processes: FrontendProcesses, times: int = 1) -> None:
        self.until(processes, lambda: len(self.ready_lines()) == times)

    def ready_lines(self) -> list[str]:
        return [line for line in self._caplog.messages if line.startswith(READY)]

    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno >= logging.WARNING]

    def until(self, processes: FrontendProcesses, what: Callable[[], bool]) -> None:
        """Runs turns of the loop until `what` is true; neither output nor the end of a child gives an event."""

        def turn() -> bool:
            processes.watch(restart=True)
            return what()

        until(turn)

    def close(self) -> None:
        for processes in self._all:
            processes.stop()


@pytest.fixture
def bench(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, caplog, monkeypatch)
    with forking("scheduler_svc.frontend"):
        yield bench
        bench.close()


def pids() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE}


def test_only_the_front_end_that_is_killed_is_replaced(bench: Bench) -> None:
    before = pids()
    processes = bench.of(2)
    bench.until_ready(processes)
    first, second = sorted(pids() - before)
    # An earlier front end and an unknown peer: both are ignored.
    processes.kill(f"f-1{second}-0a1b2c3d")
    processes.kill("unknown")
    processes.kill(f"f-{second}-0a1b2c3d")
    bench.until_ready(processes, 2)
    after = pids() - before
    assert len(after) == 2 and first in after and second not in after
    assert len(set(bench.ready_lines())) == 1
    processes.ask_to_stop()

    def has_ended() -> bool:
        processes.watch(restart=False)
        return not processes.is_running

    until(has_ended)
    assert not pids() - before


def test_a_front_end_that_hangs_is_replaced(bench: Bench) -> None:
    before = pids()
    bench.script("exec sleep 60")
    processes = bench.of(1, silence_seconds=0.3)
    bench.until_ready(processes)
    [hanging] = pids() - before
    bench.until_ready(processes, 2)
    assert not psutil.pid_exists(hanging)
    assert bench.warnings()[:2] == [
        "the front end has been silent for 0.3 s and is killed",
        "the front end ended with code -9 and is restarted in 0.1 s",
    ]


class Clock:
    """Replaces the module `time` in frontends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(frontends, "time", self)

    def monotonic(self) -> float:
        return self.now

    def turns(self, processes: FrontendProcesses, count: int) -> None:
        """Runs turns of the loop, 0.9 s each."""
        for _ in range(count):
            self.now += 0.9
            processes.watch(restart=True)


def test_a_front_end_that_prints_alive_is_kept_and_the_line_is_not_logged(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fifo = tmp_path / "says"
    os.mkfifo(fifo)
    bench.script(f"exec cat {fifo}")
    clock, processes = Clock(monkeypatch), bench.of(1, silence_seconds=3.0)
    bench.until_ready(processes)
    clock.turns(processes, 3)
    with fifo.open("w") as says:
        says.write("frontend alive\nand something else\n")
        says.flush()
        bench.until(processes, lambda: "the front end: and something else" in caplog.messages)
        assert not [line for line in caplog.messages if "alive" in line]
        clock.turns(processes, 3)
        assert bench.warnings() == []
        clock.turns(processes, 1)
    assert bench.warnings() == ["the front end has been silent for 3 s and is killed"]


def test_a_front_end_is_not_killed_for_silence_while_the_service_was_stalled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.script("exec sleep 60")
    clock, processes = Clock(monkeypatch), bench.of(1, silence_seconds=3.0)
    bench.until_ready(processes)
    clock.now += 100
    clock.turns(processes, 3)
    assert bench.warnings() == []
    clock.turns(processes, 2)
    assert len(bench.warnings()) == 1


def test_the_backoff_doubles_while_a_front_end_ends_again_and_again(bench: Bench) -> None:
    bench.script("exit 3")
    bench.until(bench.of(1), lambda: len(bench.warnings()) == 3)
    ended = "the front end ended with code 3 and is restarted in"
    assert bench.warnings() == [f"{ended} 0.1 s", f"{ended} 0.2 s", f"{ended} 0.4 s"]


def test_a_failed_restart_is_repeated_and_a_failed_first_start_ends_the_service(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    bench.script("sleep 0.1", "exit 3")
    processes = bench.of(1)
    bench.until_ready(processes)
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        bench.until(processes, lambda: len(bench.warnings()) == 2)
    said = "the front end cannot be started; the next attempt is in 0.2 s: Resource temporarily unavailable"
    assert bench.warnings()[1] == said
    bench.until_ready(processes, 2)
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        said = "^the front end cannot be started: Resource temporarily unavailable$"
        with pytest.raises(FrontendFailed, match=said):
            bench.of(1).watch(restart=True)


def test_news_of_a_front_end_ask_for_a_look(bench: Bench) -> None:
    """Else its address would be announced, and its end be seen, when something else happens."""
    bench.script("exit 3")
    processes, woken = bench.of(1), threading.Event()
    processes.wake_with(woken.set)
    processes.watch(restart=True)
    while not bench.warnings():
        assert woken.wait(TIMEOUT_SECONDS)
        woken.clear()
        processes.watch(restart=True)
    assert len(bench.ready_lines()) == 1


@pytest.mark.parametrize(("count", "name"), [(1, "the front end"), (2, "front end [12] of 2")])
def test_a_front_end_that_never_listens_ends_the_service_with_its_cause(bench: Bench, count: int, name: str) -> None:
    processes = bench.of(count, response_template=Path("/none.json"))
    cause = "response_template /none.json cannot be used: .*"
    with pytest.raises(FrontendFailed, match=f"^{name} ended with code 2 before it listened: {cause}$") as caught:
        bench.until(processes, lambda: False)
    assert caught.value.exit_code == 2


def test_settings_that_fit_no_pipe_are_refused_at_once(bench: Bench) -> None:
    before = open_descriptors()
    said = r"^the front end cannot be started: [\d,]+ bytes of settings do not fit a pipe$"
    with pytest.raises(FrontendFailed, match=said):
        bench.of(1, response_template=Path("x" * (1 << 20))).watch(restart=True)
    # The held address.
    assert len(opened_since(before)) == 1


def test_each_front_end_inherits_the_secret(bench: Bench, tmp_path: Path) -> None:
    heard, before = tmp_path / "heard", pids()
    # The last argument is the pipe.
    lines = ["for last; do :; done", f"cat /proc/self/fd/$last > {heard}", "exec sleep 60"]
    bench.script(*lines)
    processes = bench.of(1)
    bench.until(processes, lambda: heard.exists() and heard.read_bytes().endswith(b"}"))
    assert len(processes.secret) == 32
    assert FrontEndSettings.decoded(heard.read_bytes()).secret == processes.secret
    started = psutil.Process(*(pids() - before))
    shown = str([started.cmdline(), started.environ()])
    assert processes.secret.hex() not in shown and "core.sock" not in shown
    heard.unlink()
    [frontend] = pids() - before
    processes.kill(f"f-{frontend}-0a1b")
    bench.until(processes, lambda: heard.exists() and processes.secret.hex().encode() in heard.read_bytes())


@pytest.mark.skipif(sys.platform != "linux", reason="the address is held on Linux only")
def test_the_port_stays_held_while_the_only_front_end_is_replaced(bench: Bench) -> None:
    before = pids()
    processes = bench.of(1)
    bench.until_ready(processes)
    port = int(processes.listen.rpartition(":")[2])
    [frontend] = pids() - before

    def bind(*options: int) -> None:
        with socket.socket() as other:
            for option in options:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            other.bind(("127.0.0.1", port))
            other.listen()

    every = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
    for options in every:
        with pytest.raises(OSError, match="in use"):
            bind(*options)
    process = psutil.Process(frontend)
    process.kill()
    process.wait(TIMEOUT_SECONDS)
    for options in every:
        with pytest.raises(OSError, match="in use"):
            bind(*options)
    bench.until_ready(processes, 2)
    assert processes.listen.endswith(f":{port}")


def test_a_taken_address_is_refused_before_a_process_starts(bench: Bench) -> None:
    before = pids()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for count in (1, 2):
            with pytest.raises(ListenError, match="the port is taken"):
                bench.of(count, listen=f"127.0.0.1:{taken.getsockname()[1]}")
    assert pids() == before
