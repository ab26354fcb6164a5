"""What a machine that keeps processes owes its user: no orphan, no zombie, last words, and a give-up that is said."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

import psutil
import pytest

from tests.contract.machines import DIES, MACHINES, REFUSES, SOUND
from tests.rigs.processes import popen
from tests.rigs.waiting import TIMEOUT_SECONDS, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the machines are for Linux")
_PROCESS_1 = "process 1"


class User:
    """The program that uses a machine, and the machine's processes as seen from here."""

    def __init__(self, name: str, mode: str, adopts: str = "") -> None:
        """`adopts`: see `machines.main`."""
        ends = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        self._popen = popen("tests.contract.machines", name, mode, adopts, text=True, **ends)
        self._own, self._is_within = psutil.Process(self._popen.pid), adopts == _PROCESS_1

    def ask(self, line: str = "serve") -> str | None:
        """Has it work; returns the outcome."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()
        return json.loads(self._popen.stdout.readline())

    @property
    def process(self) -> psutil.Process:
        """The program itself."""
        return self._own.children()[0] if self._is_within else self._own

    def others(self) -> list[psutil.Process]:
        """The processes of the machine, zombies too."""
        return self.process.children(recursive=True)

    def end(self, *, kills: bool = False) -> None:
        """Ends the program, in order unless `kills`."""
        if kills and self._popen.poll() is None:
            self.process.kill()
        self._popen.communicate(timeout=TIMEOUT_SECONDS)


Make = Callable[..., User]


@pytest.fixture
def user() -> Iterator[Make]:
    made: list[User] = []

    def make(*arguments: str) -> User:
        made.append(User(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.end(kills=True)


def is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


def is_gone(process: psutil.Process) -> bool:
    """Whether an orphan has ended. Where no process reaps it, it stays the zombie of a process that is not ours."""
    return is_zombie(process) or not process.is_running()


@cache
def may_be_process_1() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("when", ["they serve", "they start", "they are stopped"])
@pytest.mark.parametrize("name", MACHINES)
def test_no_process_outlives_its_user_that_is_killed(user: Make, name: str, when: str) -> None:
    """A stopped one stands for one that computes for minutes: it sees no socket that is closed."""
    one = user(name, SOUND)
    assert not one.ask("begin" if when == "they start" else "serve")
    others = until(one.others, "the processes")
    if when == "they are stopped":
        for each in others:
            each.suspend()
    one.end(kills=True)
    try:
        until(lambda: all(map(is_gone, others)), "the end of the processes")
    finally:
        for each in others:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.parametrize("adopts", ["", "subreaper", _PROCESS_1])
@pytest.mark.parametrize("name", MACHINES)
def test_a_process_that_is_killed_is_no_zombie_and_is_replaced(user: Make, name: str, adopts: str) -> None:
    """Although its user does nothing meanwhile, and also if its user is the process that gets orphans."""
    if adopts == _PROCESS_1 and not may_be_process_1():
        pytest.skip("this user may not be process 1 of others")
    one = user(name, SOUND, adopts)
    assert one.ask() == ""
    num = len(one.others())
    assert num > 0
    for victims in [*(slice(i, i + 1) for i in range(num)), slice(num)]:
        killed = one.others()[victims]
        for each in killed:
            # It ends with its parent, which may have been killed before it.
            with suppress(psutil.NoSuchProcess):
                each.kill()
        # A zombie runs, as psutil sees it.
        until(lambda killed=killed: not any(each.is_running() for each in killed), "no zombie")
        until(lambda: not any(map(is_zombie, one.others())), "no adopted zombie")
        assert one.ask() == ""
        others = one.others()
        assert len(others) == num
    # None outlives a user that ends in order.
    one.end()
    until(lambda: all(map(is_gone, others)), "the end of the processes")


@pytest.mark.parametrize("name", MACHINES)
def test_the_last_words_of_a_process_are_told(user: Make, name: str) -> None:
    outcome = user(name, REFUSES).ask()
    assert outcome is not None and re.search(MACHINES[name].cause, outcome), outcome


@pytest.mark.parametrize("name", MACHINES)
def test_it_is_told_that_no_other_process_is_started(user: Make, name: str) -> None:
    one = user(name, DIES)
    outcome = one.ask()
    assert outcome is not None and re.search(MACHINES[name].give_up, outcome), outcome
    until(lambda: not one.others(), "no process")
