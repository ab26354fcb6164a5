"""The low priority of a start: it ends with the start, and the process's own thread never has it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu_worker.process.starting import at_low_priority

AUTOGROUP = Path("/proc/self/autogroup")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_work_and_its_threads_are_nice_and_the_caller_is_not() -> None:
    def work() -> list[int]:
        found = [nice()]
        thread = threading.Thread(target=lambda: found.append(nice()))
        thread.start()
        thread.join()
        return found

    before = nice()
    assert at_low_priority(work) == [min(19, before + 10)] * 2
    assert nice() == before


def test_an_exception_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not group tasks by session")
@pytest.mark.parametrize(("leads", "expected"), [(True, "10 0"), (False, "0 0")])
def test_the_priority_of_its_own_session_is_low_meanwhile(leads: bool, expected: str) -> None:
    """A session that belongs to another process keeps its priority."""
    program = (
        "from gpu_worker.process.starting import at_low_priority\n"
        "read = lambda: open('/proc/self/autogroup').read().split()[-1]\n"
        "print(at_low_priority(read), read())"
    )
    command = [sys.executable, "-c", program]
    if not leads:
        # The shell leads the session.
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    assert done.stdout.strip() == expected
