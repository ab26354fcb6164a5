"""A worker on its node: small real processes in place of the worker, no Ray. `tests/contract` has their deaths."""

import os
import random
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator

import psutil
import pytest

from gpu_worker.cluster.fleet import Fleet, Report, Worker, policy, why_not_placed
from tandem_contract.processes import GiveUp, Restart, State
from tests.rigs.fatal_signal import fatal_signal
from tests.rigs.waiting import until

JOINED = "2026-11-23 worker INFO joined the scheduler; generation 1"
SERVES = f'print("{JOINED}", flush=True); signal.pause()'


class Program(Fleet):
    """A fleet with a few lines of Python as its worker."""

    def command(self) -> tuple[str, ...]:
        ends_with_parent = "import ctypes; ctypes.CDLL(None).prctl(1, 9)"
        return (sys.executable, "-c", f"{ends_with_parent}\nimport os, signal, sys, time\n{self.flags[0]}")


def program(code: str, **settings: int) -> Program:
    return Program(name="test", connect="", keys="", flags=(textwrap.dedent(code),), **settings)  # type: ignore[arg-type]


@pytest.fixture
def supervise() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def start(code: str, **settings: int) -> Worker:
        made.append(Worker(program(code, **settings), 3))
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.stop(5.0)


def wait(supervisor: Worker, what: Callable[[Report], bool]) -> Report:
    """Waits until the report satisfies `what`, by asking, as `status` does."""
    return until(lambda: (report := supervisor.report()) and what(report) and report, "a report of the supervisor")


IGNORES = """
    import subprocess
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("joined the scheduler", flush=True)
    while True:
        signal.pause()
"""


def test_a_worker_that_ignores_its_order_is_killed_with_what_it_started(supervise: Callable[..., Worker]) -> None:
    supervisor = supervise(IGNORES)
    pid = wait(supervisor, lambda report: report.state == State.SERVING).pid
    processes = [psutil.Process(pid), *psutil.Process(pid).children()]
    assert len(processes) == 2
    supervisor.stop(0.2)
    assert not psutil.wait_procs(processes, timeout=5.0)[1]


def test_a_worker_serves_once_it_has_joined_and_ends_in_order(
    supervise: Callable[..., Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = supervise(SERVES)
    report = wait(supervisor, lambda report: report.state == State.SERVING)
    assert report.number == 3 and report.num_starts == 1 and psutil.pid_exists(report.pid)
    supervisor.stop(30.0)
    assert supervisor.report().state == State.STOPPED and not psutil.pid_exists(report.pid)
    assert capsys.readouterr().err == f"worker 3: {JOINED}\n"


def test_a_worker_that_is_killed_starts_again(supervise: Callable[..., Worker]) -> None:
    supervisor = supervise(SERVES)
    first = wait(supervisor, lambda report: report.state == State.SERVING)
    os.kill(first.pid, signal.SIGKILL)
    again = wait(supervisor, lambda report: report.state == State.SERVING and report.num_starts == 2)
    assert again.pid != first.pid and again.cause == f"was ended by SIGKILL: {JOINED}"


@pytest.mark.parametrize("last", ["", "gpu_worker: the phase; a hint"])
def test_a_fatal_signal_is_told_without_pythons_stacks(supervise: Callable[..., Worker], last: str) -> None:
    supervisor = supervise(fatal_signal(last), max_failures=1)
    report = wait(supervisor, lambda report: report.state == State.GIVEN_UP)
    told = last or "Fatal Python error: Segmentation fault"
    assert report.cause == f"was ended by SIGSEGV; it is not started again: {told}"


def test_refused_settings_are_not_tried_again_until_asked(supervise: Callable[..., Worker]) -> None:
    supervisor = supervise('print("gpu_worker: keys: /k cannot be read; `tandem keys`"); sys.exit(2)')
    report = wait(supervisor, lambda report: report.state == State.GIVEN_UP)
    assert report.num_starts == 1 and report.pid == 0
    assert report.cause == "ended with exit code 2: gpu_worker: keys: /k cannot be read; `tandem keys`"
    assert supervisor.retry()
    assert wait(supervisor, lambda report: report.num_starts == 2 and report.state == State.GIVEN_UP)
    supervisor.stop(5.0)
    assert not supervisor.retry()


def test_failures_in_a_row_are_bounded_and_the_cause_is_kept(supervise: Callable[..., Worker]) -> None:
    supervisor = supervise('print("gpu_worker: the GPU is gone"); sys.exit(1)', max_failures=3)
    report = wait(supervisor, lambda report: report.state == State.GIVEN_UP)
    assert report.num_starts == 3
    assert report.cause == (
        "ended with exit code 1, 3 times in a row; it is not started again: gpu_worker: the GPU is gone"
    )


def test_pauses_double_within_bounds_and_a_steady_worker_starts_afresh() -> None:
    restart = Restart(policy(12), random.Random(1))

    def decide(status: int, served_seconds: float) -> float | GiveUp:
        ever_served = served_seconds > 0
        return restart.decide(
            at=0.0, status=status, ever_served=ever_served, start_seconds=1.0, served_seconds=served_seconds
        )

    pauses = [decide(1, 0.0) for _ in range(11)]
    bounds = [min(0.1 * 2**n, 30.0) for n in range(11)]
    for pause, bound in zip(pauses, bounds, strict=True):
        assert isinstance(pause, float) and bound / 2 <= pause <= bound
    assert isinstance(decide(-9, 1.0), GiveUp)
    assert isinstance(decide(-9, 60.0), float)
    # That was the first one in a row.
    assert all(isinstance(decide(1, 0.0), float) for _ in range(10))
    assert isinstance(decide(1, 0.0), GiveUp)
    assert decide(0, 1.0) == 0.0
    # Settings that worked once are not the fault.
    assert isinstance(decide(2, 1.0), float)


def test_nodes_that_are_too_small_are_listed() -> None:
    # Nodes may have the same name.
    nodes = [("a", {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}), ("a", {"CPU": 4.0})]
    assert why_not_placed(2, 3, {"CPU": 1, "GPU": 1}, nodes) == (
        "2 of 3 workers found 1 GPU and 1 CPU free on a node; nodes: a has 2 GPU and 8 CPU, a has 0 GPU and 4 CPU; "
        "add nodes, or place fewer; workers without a GPU need --device cpu"
    )
    assert "nodes: none is there;" in why_not_placed(0, 1, {"CPU": 1, "GPU": 0}, [])


def test_a_report_reads_as_a_line() -> None:
    cause = "was ended by SIGKILL: the last line"
    report = Report(number=1, state=State.PAUSED, host="a", num_starts=4, seconds=130.2, cause=cause)
    assert str(report) == f"worker 1 on a: pausing for 0:02:10, start 4: {cause}"
    starts = Report(number=1, state=State.STARTING, pid=7, last_line="it loads")
    assert str(starts) == "worker 1: starting for 0:00:00, pid 7: it loads"
