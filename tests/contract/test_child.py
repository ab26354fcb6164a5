"""One life of a child process: its lines, its end, and what it leaves."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem_contract import child
from tandem_contract.child import Child, Program, python
from tests.rigs.processes import no_threads
from tests.rigs.waiting import TIMEOUT_SECONDS, until

# In one write, because a child's streams are unbuffered and two processes share the pipe.
LEAVES = "import os, signal; os.write(1, b'left\\n'); signal.pause()"


class Watched:
    """A child of a few lines of Python; the test takes its lines when the child says so."""

    def __init__(self, code: str, **program: object) -> None:
        self._woken = threading.Event()
        self.lines: list[str] = []
        argv = (sys.executable, "-c", f"import os, signal, subprocess, sys\n{code}")
        self.child = Child(Program(argv=argv, **program), self._woken.set)  # type: ignore[arg-type]

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self._woken.wait(TIMEOUT_SECONDS), self.lines
            self._woken.clear()
            assert self.child.end is None
            self.lines += self.child.take()

    def until_end(self) -> int:
        self.until(lambda: self.child.end is not None)
        assert self.child.end is not None
        return self.child.end


@pytest.fixture
def start() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(code: str, **program: object) -> Watched:
        made.append(Watched(code, **program))
        return made[-1]

    yield start
    for each in made:
        each.child.kill()
        until(lambda each=each: not psutil.pid_exists(each.child.pid), "the end of the child")


Start = Callable[..., Watched]


def test_all_lines_come_before_the_end(start: Start) -> None:
    """More than wait in the queue and in the pipe."""
    one = start("for n in range(20_000): print(f'{n:050}')\nprint('to stderr', file=sys.stderr)\nsys.exit(3)")
    assert one.until_end() == 3
    assert [int(line) for line in one.lines if line != "to stderr"] == list(range(20_000))
    assert "to stderr" in one.lines and one.child.how_it_ended() == "ended with exit code 3"


def test_a_long_line_is_cut_and_the_next_one_is_whole(start: Start) -> None:
    one = start("print('x' * 100_000); sys.stdout.buffer.write(b'bad \\xff\\n'); print('without an end', end='')")
    assert one.until_end() == 0
    assert one.lines == ["x" * 65_536, "bad \N{REPLACEMENT CHARACTER}", "without an end"]


def test_the_end_is_seen_although_another_process_holds_the_output(start: Start) -> None:
    """One in the child's session ends with it; one that left goes on."""
    one = start(
        f"for own in (False, True): subprocess.Popen([sys.executable, '-c', {LEAVES!r}], start_new_session=own)\n"
        "print('started', flush=True); signal.pause()"
    )
    one.until(lambda: one.lines.count("left") == 2)
    others = psutil.Process(one.child.pid).children()
    stays = [each for each in others if os.getsid(each.pid) == each.pid]
    os.kill(one.child.pid, signal.SIGKILL)
    try:
        assert one.until_end() == -signal.SIGKILL
        assert one.child.how_it_ended().startswith("was ended by SIGKILL")
        [ended] = set(others) - set(stays)
        ended.wait(TIMEOUT_SECONDS)
        assert stays[0].is_running()
    finally:
        stays[0].kill()


def test_a_signal_reaches_the_process_alone_and_a_kill_what_it_started(start: Start) -> None:
    other = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); signal.pause()"
    one = start(f"subprocess.Popen([sys.executable, '-c', {other!r}]); signal.pause()")
    one.until(lambda: "child" in one.lines)
    [other_process] = psutil.Process(one.child.pid).children()
    one.child.signal(signal.SIGCONT)
    assert other_process.is_running()
    one.child.kill()
    assert one.until_end() == -signal.SIGKILL
    other_process.wait(TIMEOUT_SECONDS)


def test_after_the_end_no_signal_is_sent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may be that of another process."""
    one = start("pass")
    one.until_end()

    def refuse(pid: int, number: int) -> None:
        pytest.fail(f"signal {number} was sent to {pid}")

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(os, "killpg", refuse)
    one.child.signal(signal.SIGTERM)
    one.child.kill()


def test_a_child_that_somebody_else_has_reaped_has_ended(start: Start) -> None:
    one = start("print(sys.stdin.read(), flush=True)")
    one.child.signal(signal.SIGSTOP)
    one.child.signal(signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(one.child.pid, 0)
    assert one.until_end() in (0, -signal.SIGKILL)


def test_a_child_inherits_descriptors_that_are_closed_here(start: Start) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"secret")
    os.close(writing)
    one = start(f"print(os.read({reading}, 9))", descriptors=(reading,))
    one.until_end()
    assert one.lines == ["b'secret'"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(OSError, match="No such file"):
        Child(Program(argv=("/no/such/program",), descriptors=(reading,)), lambda: None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_a_program_imports_nothing_from_its_working_directory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shadow.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/other"]))
    one = start("print(os.environ['PYTHONPATH'], os.environ['ADDED'])", environment={"ADDED": "more"})
    one.until_end()
    assert one.lines == ["/other more"]
    shadowed = Child(Program(argv=python("shadow")), lambda: None)
    lines: list[str] = []
    until(lambda: lines.extend(shadowed.take()) or shadowed.end is not None)
    assert shadowed.end == 1 and "No module named shadow" in lines[-1]


def test_a_child_that_the_kernel_killed_for_memory_is_named_so(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(child, "_KERNEL_COUNTS", counts)
    # The kernel has killed no process; another one, and this one ends on SIGTERM; this one.
    for before, after, code in ((3, 3, "signal.SIGKILL"), (3, 4, "signal.SIGTERM"), (4, 5, "signal.SIGKILL")):
        counts.write_text(f"nr_free_pages 5\noom_kill {before}\noom_kill_x 9\n")
        one = start(f"signal.raise_signal({code})")
        one.until_end()
        counts.write_text(f"nr_free_pages 5\noom_kill {after}\noom_kill_x 9\n")
        assert ("memory ran out" in one.child.how_it_ended()) == (after == 5)


def test_a_process_without_threads_to_watch_it_does_not_start() -> None:
    before = {each.pid for each in psutil.Process().children()}
    with no_threads(), pytest.raises(OSError, match="can't start new thread"):
        Child(Program(argv=(sys.executable, "-c", LEAVES)), lambda: None)
    assert {each.pid for each in psutil.Process().children()} == before
