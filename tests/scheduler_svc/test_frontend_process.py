"""The front ends as children: which of them is replaced, and what is said where one never comes up."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scheduler_svc.frontend_process import FrontendProcesses

READY = "frontend listening on "


class Bench:
    """Front ends that find no core, and what they print."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._flags = ["--endpoint", f"ipc://{folder}/core.sock", "--log-level", "error"]
        self._capsys = capsys
        self._printed = ""
        self._all: list[FrontendProcesses] = []

    def of(self, count: int, *more_flags: str) -> FrontendProcesses:
        self._all.append(FrontendProcesses(count, listen="127.0.0.1:0", flags=[*self._flags, *more_flags]))
        return self._all[-1]

    def ready_lines(self) -> list[str]:
        self._printed += self._capsys.readouterr().out
        return [line for line in self._printed.splitlines() if line.startswith(READY)]

    def until(self, processes: FrontendProcesses, what: Callable[[], bool]) -> None:
        """Turns of the loop until it is so; nothing tells when a child has printed or ended."""
        limit = time.monotonic() + 30
        while not what():
            assert time.monotonic() < limit
            processes.watch(restart=True)
            time.sleep(0.01)

    def close(self) -> None:
        for processes in self._all:
            processes.stop()


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    bench = Bench(tmp_path, capsys)
    yield bench
    bench.close()


def pids() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE}


def test_the_one_that_is_given_up_is_replaced_alone(bench: Bench) -> None:
    before = pids()
    processes = bench.of(2)
    bench.until(processes, lambda: len(bench.ready_lines()) == 1)
    first, second = sorted(pids() - before)
    # One that was lost before, or that is none of ours.
    processes.give_up(f"f-1{second}-0a1b2c3d")
    processes.give_up("somebody")
    processes.give_up(f"f-{second}-0a1b2c3d")
    bench.until(processes, lambda: len(bench.ready_lines()) == 2)
    after = pids() - before
    assert len(after) == 2
    assert first in after
    assert second not in after
    assert len(set(bench.ready_lines())) == 1
    processes.ask_to_stop()
    limit = time.monotonic() + 30
    while processes.is_running:
        assert time.monotonic() < limit
        processes.watch(restart=False)
        time.sleep(0.01)
    assert not pids() - before


@pytest.mark.parametrize(("count", "name"), [(1, "the front end"), (2, "front end [12] of 2")])
def test_one_that_never_comes_up_ends_the_service(bench: Bench, count: int, name: str) -> None:
    processes = bench.of(count, "--no-such-flag")
    with pytest.raises(SystemExit, match=f"^scheduler_svc: {name} ended with code 2 before it listened; see above$"):
        bench.until(processes, lambda: False)
