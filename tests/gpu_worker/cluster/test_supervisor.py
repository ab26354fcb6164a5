"""A supervisor and its worker: small real processes in place of the worker, no Ray."""

import io
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from gpu_worker.cluster.capacity import Node, why_not_placed, why_too_small
from gpu_worker.cluster.fleet import Fleet
from gpu_worker.cluster.reports import Report, State, line_of, summary_of
from gpu_worker.cluster.supervisor import Supervisor, policy
from tandem_contract.processes import GiveUp, Restart
from tests.architecture.source import ROOT
from tests.rigs.waiting import TIMEOUT_SECONDS, until

FLEET = Fleet(name="test", connect="tcp://127.0.0.1:1", keys="/nowhere")
JOINED = "2026-11-23 worker INFO joined the scheduler; generation 1"
SERVES = f'print("{JOINED}", flush=True); signal.pause()'


class Program(Fleet):
    """A fleet whose worker is a few lines of Python."""

    __slots__ = ()

    def command(self, python: str) -> list[str]:
        ends_with_parent = "import ctypes; ctypes.CDLL(None).prctl(1, 9)"
        return [python, "-c", f"{ends_with_parent}\nimport os, signal, sys, time\n{self.flags[0]}"]


def program(code: str, **settings: int) -> Program:
    return Program(name="test", connect="", keys="", flags=(textwrap.dedent(code),), **settings)  # type: ignore[arg-type]


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    made: list[Supervisor] = []

    def start(code: str, *, output: io.StringIO | None = None, **settings: int) -> Supervisor:
        made.append(Supervisor(program(code, **settings), number=3, output=output or io.StringIO()))
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.stop(5.0)


def wait(supervisor: Supervisor, what: Callable[[Report], bool]) -> Report:
    """Waits until the report satisfies `what`, by asking, as `status` does."""
    return until(lambda: (report := supervisor.report()) and what(report) and report, "a report of the supervisor")


def test_a_worker_serves_once_it_has_joined_and_ends_in_order(supervise: Callable[..., Supervisor]) -> None:
    output = io.StringIO()
    supervisor = supervise(SERVES, output=output)
    report = wait(supervisor, lambda report: report.state == State.SERVING)
    assert report.number == 3 and report.num_starts == 1 and psutil.pid_exists(report.pid)
    supervisor.stop(30.0)
    assert supervisor.report().state == State.STOPPED and not psutil.pid_exists(report.pid)
    assert output.getvalue() == f"worker 3: {JOINED}\n"


def test_a_worker_that_is_killed_starts_again(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(SERVES)
    first = wait(supervisor, lambda report: report.state == State.SERVING)
    os.kill(first.pid, signal.SIGKILL)
    again = wait(supervisor, lambda report: report.state == State.SERVING and report.num_starts == 2)
    assert again.pid != first.pid and again.cause == f"killed by SIGKILL: {JOINED}"


@pytest.mark.parametrize("last", ["", "gpu_worker: the phase; a hint"])
def test_a_fatal_signal_is_told_without_pythons_stacks(supervise: Callable[..., Supervisor], last: str) -> None:
    # A child writes the stacks, so that a line can follow them.
    crashes = f"""
        import faulthandler
        def deep(n):
            return deep(n - 1) if n else signal.raise_signal(signal.SIGSEGV)
        if not os.fork():
            faulthandler.enable()
            deep(90)
        os.wait()
        print({last!r}, flush=True)
        signal.raise_signal(signal.SIGSEGV)
        """
    supervisor = supervise(crashes, max_failures=1)
    report = wait(supervisor, lambda report: report.state == State.GIVEN_UP)
    told = last or "Fatal Python error: Segmentation fault"
    assert report.cause == f"it failed 1 times in a row: killed by SIGSEGV: {told}"


def test_refused_settings_are_not_tried_again_until_asked(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise('print("gpu_worker: keys: /k cannot be read; `tandem keys`"); sys.exit(2)')
    report = wait(supervisor, lambda report: report.state == State.GIVEN_UP)
    assert report.num_starts == 1 and report.pid == 0
    assert report.cause == (
        "its settings are refused on this node: exit code 2: gpu_worker: keys: /k cannot be read; `tandem keys`"
    )
    assert supervisor.retry()
    assert wait(supervisor, lambda report: report.num_starts == 2 and report.state == State.GIVEN_UP)
    supervisor.stop(5.0)
    assert not supervisor.retry()


def test_failures_in_a_row_are_bounded_and_the_cause_is_kept(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise('print("gpu_worker: the GPU is gone"); sys.exit(1)', max_failures=3)
    report = wait(supervisor, lambda report: report.state == State.GIVEN_UP)
    assert report.num_starts == 3
    assert report.cause == "it failed 3 times in a row: exit code 1: gpu_worker: the GPU is gone"


def test_a_worker_that_ignores_its_signal_is_killed_with_what_it_started(
    supervise: Callable[..., Supervisor],
) -> None:
    supervisor = supervise(
        """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print("its child is", other.pid, flush=True)
        print("joined the scheduler", flush=True)
        while True:
            signal.pause()
        """
    )
    report = wait(supervisor, lambda report: report.state == State.SERVING)
    [child] = psutil.Process(report.pid).children()
    supervisor.stop(0.2)
    child.wait(TIMEOUT_SECONDS)
    assert not psutil.pid_exists(report.pid)


def test_a_worker_ends_with_the_process_that_holds_its_supervisor() -> None:
    code = (
        "import time; from tests.gpu_worker.cluster.test_supervisor import SERVES, State, program, wait\n"
        "from gpu_worker.cluster.supervisor import Supervisor\n"
        "supervisor = Supervisor(program(SERVES))\n"
        "print(wait(supervisor, lambda report: report.state == State.SERVING).pid, flush=True)\n"
        "time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    with holder.stdout as lines:
        worker = psutil.Process(int(lines.readline()))
    holder.kill()
    holder.wait()
    psutil.wait_procs([worker], timeout=TIMEOUT_SECONDS)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


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
    nodes = [Node(name="a", resources={"CPU": 8.0, "GPU": 2.0, "memory": 1e9}), Node(name="b", resources={"CPU": 4.0})]
    assert why_too_small(nodes, {"CPU": 1.0, "GPU": 1.0}, 2) == ""
    assert why_too_small(nodes, {"CPU": 1.0, "GPU": 1.0}, 3) == (
        "3 workers of 1 GPU and 1 CPU each do not fit: room for 2; nodes: a has 2 GPU and 8 CPU, b has 4 CPU; "
        "add nodes, or place fewer"
    )
    assert why_too_small(nodes[1:], {"CPU": 1.0, "GPU": 1.0}, 1).endswith("workers without a GPU need --device cpu")
    # Nodes may have the same name.
    assert why_too_small([nodes[0], replace(nodes[1], name="a")], {"CPU": 1.0}, 12) == ""
    # A worker of several ranks needs them all on one node.
    assert "room for 0" in why_too_small(nodes, {"GPU": 4.0}, 1)
    assert why_not_placed(1, 2, {"GPU": 1.0}, {"CPU": 3.0}).startswith("1 of 2 workers found 1 GPU free on a node")


def test_a_report_travels_as_plain_values_and_reads_as_a_line() -> None:
    report = Report(number=1, state=State.PAUSED, host="a", num_starts=4, seconds=130.0, cause="killed by SIGKILL")
    assert Report.of_plain(report.plain()) == report
    assert line_of(report) == "worker 1 on a: pausing for 2 min, start 4: killed by SIGKILL"
    assert summary_of([report, replace(report, state=State.SERVING)]) == "1 of 2 workers serve"
