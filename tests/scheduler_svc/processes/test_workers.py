"""Hung workers are killed only if they are children of the same program as the service, and the same process still."""

import os
import signal
import subprocess
import sys

import pytest

from scheduler_svc.processes.workers import WorkerProcesses
from tests.rigs.descriptors import open_descriptors, opened_since
from tests.rigs.waiting import TIMEOUT_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfds and /proc are Linux only")


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_child_of_the_same_parent_is_killed_also_if_it_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    workers = WorkerProcesses(os.getpid())
    workers.joined("w", sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    workers.kill("w")
    assert sleeper.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    workers.kill("w")  # it has ended


@pytest.mark.parametrize("parent", [None, 1, os.getppid()])
def test_other_processes_are_left_alone(sleeper: subprocess.Popen[bytes], parent: int | None) -> None:
    workers = WorkerProcesses(parent)
    workers.joined("w", sleeper.pid)
    workers.kill("w")
    workers.kill("unknown")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)


@pytest.mark.parametrize("pid", [0, 2**31 - 1])
def test_a_process_that_does_not_exist_is_not_remembered(pid: int) -> None:
    workers = WorkerProcesses(os.getpid())
    workers.joined("w", pid)
    workers.kill("w")


def test_descriptors_are_closed_when_a_worker_joins_again_or_leaves(sleeper: subprocess.Popen[bytes]) -> None:
    workers = WorkerProcesses(os.getpid())
    before, one = open_descriptors(), "anon_inode:[pidfd]"
    for name in ("a", "b", "a"):
        workers.joined(name, sleeper.pid)
    assert opened_since(before) == [one, one]
    workers.keep({"b"})
    assert opened_since(before) == [one]
    workers.kill("a")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)
    workers.keep(())
    assert not opened_since(before)
