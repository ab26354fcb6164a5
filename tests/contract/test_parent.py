"""A process ends with the one that started it, also if that one ended before it could ask."""

import os
import subprocess
import sys

import psutil
import pytest

from tandem_contract.child import PARENT
from tests.rigs.processes import child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS

CHILD = """
import os, time
from tandem_contract.child import PARENT, die_with_parent
die_with_parent()
print(os.getpid(), PARENT in os.environ, flush=True)
time.sleep(600)
"""
STARTER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of the parent")
def test_a_process_ends_when_its_parent_is_killed() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, CHILD], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert starter.stdout is not None
    with starter.stdout as lines:
        child = psutil.Process(int(lines.readline().split()[0]))
        starter.kill()
        starter.wait()
    psutil.wait_procs([child], timeout=TIMEOUT_SECONDS)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of the parent")
def test_a_process_whose_parent_has_ended_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**child_environment(), PARENT: str(gone.pid)}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_processes_that_it_starts_do_not_inherit_the_variable() -> None:
    environment = {**child_environment(), PARENT: str(os.getpid())}
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline().split() == [str(child.pid), "False"]
        child.kill()
