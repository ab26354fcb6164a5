"""Runs the tests of several files at once, in processes forked from the one that has collected them.

So modules are imported and tests are collected once, and not once per process. Each process takes file after file. If
one dies, the test that it ran has failed, and another process takes what it had left. Their reports become the first
process's own; everything else of pytest is as in one process.

The first process also watches that no test takes longer than pytest-timeout would let it: that plugin starts a thread
for each test, which takes as long as the shortest tests. The process that is late ends with the lines where it was.

Files with a mark `together` of one name are run by one process, because what they need is started once per process.
"""

import atexit
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

# Seconds between two looks for processes that are late.
_LOOK_SECONDS = 1.0
# What a process asks for. Of each test that has ended it sends the number and the reports, as dictionaries.
_MORE = "more"


def share_of(item: pytest.Item) -> str:
    """What one process runs whole: the tests of a file, or of those that are marked as belonging together."""
    mark = item.get_closest_marker("together")
    return item.nodeid.partition("::")[0] if mark is None else mark.args[0]


@dataclass(slots=True)
class _Process:
    """One that runs tests. `left`: the numbers of those that it was given and has not ended, in order. `since`: when it
    was last heard, in seconds of the monotonic clock."""

    pid: int
    number: int
    left: deque[int] = field(default_factory=deque[int])
    since: float = field(default_factory=time.monotonic)


class ForkedSuite:
    """A plugin of pytest, in the process that collects."""

    def __init__(self, jobs: int, limits: Sequence[AbstractContextManager[None]] = ()) -> None:
        """`limits`: entered by each process before it runs tests."""
        self._jobs, self._limits = jobs, limits
        self._running = dict[Connection, _Process]()
        # Numbers of tests, share by share.
        self._waiting = deque[list[int]]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has no other thread"
        session.config.pluginmanager.getplugin("terminalreporter").showfspath = False
        shares = groupby(range(len(session.items)), key=lambda number: share_of(session.items[number]))
        self._waiting.extend(list(numbers) for _, numbers in shares)
        try:
            for number in range(self._jobs):
                self._start(session, number)
            while self._running:
                for connection in wait(list(self._running), _LOOK_SECONDS):
                    assert isinstance(connection, Connection)
                    self._hear(session, connection)
                self._end_late(session)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for process in self._running.values():
                os.kill(process.pid, signal.SIGINT)
            for process in self._running.values():
                os.waitpid(process.pid, 0)
        return True

    def _start(self, session: pytest.Session, number: int) -> None:
        ours, theirs = Pipe()
        if pid := os.fork():
            theirs.close()
            self._running[ours] = _Process(pid, number)
            return
        for connection in (ours, *self._running):
            connection.close()
        _run(session, number, theirs, self._limits)

    def _hear(self, session: pytest.Session, connection: Connection) -> None:
        """Takes one message of a process, or its end."""
        process = self._running[connection]
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            del self._running[connection]
            connection.close()
            self._ended(session, process)
            return
        process.since = time.monotonic()
        hook = session.config.hook
        match message:
            case str():
                assert message == _MORE
                given = self._waiting.popleft() if self._waiting else []
                process.left.extend(given)
                connection.send(given)
            case number, reports:
                assert number == process.left.popleft()
                for data in reports:
                    report = hook.pytest_report_from_serializable(config=session.config, data=data)
                    hook.pytest_runtest_logreport(report=report)

    def _end_late(self, session: pytest.Session) -> None:
        """Has pytest's handler of fatal signals write where the threads are of a process whose test takes too long."""
        for process in self._running.values():
            limit = _limit(session.items[process.left[0]]) if process.left else 0
            if limit and time.monotonic() - process.since > limit:
                os.kill(process.pid, signal.SIGABRT)

    def _ended(self, session: pytest.Session, process: _Process) -> None:
        _, status = os.waitpid(process.pid, 0)
        if not process.left:
            assert status == 0, f"a process ended with {os.waitstatus_to_exitcode(status)}, and not in a test"
            return
        item = session.items[process.left.popleft()]
        text = f"the process that ran this test ended with {os.waitstatus_to_exitcode(status)}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if process.left:
            self._waiting.appendleft(list(process.left))
        self._start(session, process.number)


def _limit(item: pytest.Item) -> float:
    """The seconds that a test may take; 0: any number. As pytest-timeout is told them."""
    mark, config = item.get_closest_marker("timeout"), item.config
    return float(mark.args[0] if mark else config.getoption("timeout") or config.getini("timeout") or 0)


class _Reporter:
    """In place of the terminal's, in a process that runs tests: keeps the reports of one test."""

    def __init__(self, config: pytest.Config, terminal: Any) -> None:
        self._config, self._reports = config, list[dict[str, Any]]()
        # With what pytest shows the two sides of an assertion.
        self._tw = terminal._tw

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def taken(self) -> list[dict[str, Any]]:
        taken, self._reports = self._reports, []
        return taken


def _run(
    session: pytest.Session, number: int, connection: Connection, limits: Sequence[AbstractContextManager[None]]
) -> NoReturn:
    status = 1
    try:
        # What the first process has to do at its end is not this one's.
        atexit._clear()
        reporter = _separate(session.config, number)
        with ExitStack() as stack:
            for limit in limits:
                stack.enter_context(limit)
            _run_tests(session, connection, reporter)
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    try:
        # Fixtures that an interrupt has left.
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _separate(config: pytest.Config, number: int) -> _Reporter:
    """Gives this process its own of what the first one has, where both would write."""
    plugins = config.pluginmanager
    plugins.unregister(name="timeout")
    reporter = _Reporter(config, plugins.unregister(name="terminalreporter"))
    plugins.register(reporter, "terminalreporter")
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders: Any = config
    factory = folders._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"process{number}"
    factory._basetemp.mkdir(mode=0o700, exist_ok=True)
    return reporter


def _run_tests(session: pytest.Session, connection: Connection, reporter: _Reporter) -> None:
    def numbers() -> Iterator[int]:
        while given := _ask(connection):
            yield from given

    # The next test is known while one runs, so that fixtures of both are kept.
    ahead = numbers()
    number = next(ahead, None)
    while number is not None:
        following = next(ahead, None)
        item, after = session.items[number], None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        connection.send((number, reporter.taken()))
        if session.shouldfail or session.shouldstop:
            return
        number = following


def _ask(connection: Connection) -> list[int]:
    connection.send(_MORE)
    return connection.recv()
