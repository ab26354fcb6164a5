"""A supervisor over all lives of its process: its states, with processes and clock of the test, and its drivers."""

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import floats, integers, sampled_from

from tandem_contract.child import Program
from tandem_contract.processes import (
    Ended,
    GiveUp,
    Heard,
    Policy,
    ServiceEnded,
    State,
    Supervisor,
    run,
    run_async,
)
from tandem_contract.stopping import STOP
from tests.rigs.processes import child_environment
from tests.rigs.waiting import TIMEOUT_SECONDS, until

PROGRAM = Program(argv=("program",))
NO_JITTER = Policy(jitter=False, max_ends=5)


def hear(line: str) -> Heard:
    return {"serves": Heard.SERVES, "alive": Heard.ALIVE}.get(line, Heard.WORDS)


class FakeLife:
    """A process that ends at a word of the test."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.end: int | None = None
        self.signals: list[int] = []
        self._lines: list[str] = []
        self._status: int | None = None

    def say(self, *lines: str) -> None:
        self._lines += lines

    def die(self, status: int, *lines: str) -> None:
        self.say(*lines)
        self._status = status

    def take(self) -> list[str]:
        lines, self._lines, self.end = self._lines, [], self._status
        return lines

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)
        self._status = -signal.SIGKILL

    def how_it_ended(self) -> str:
        return f"ended with {self.end}"


class Bench:
    """A supervisor, its clock, its processes, and its reports."""

    def __init__(self, policy: Policy = NO_JITTER, **options: object) -> None:
        self.now = 100.0
        self.lives: list[FakeLife] = []
        self.told: list[State | str] = []
        self.refusal: OSError | None = None
        self.program: Program | None = PROGRAM
        self.one = Supervisor(
            "it",
            lambda: self.program,
            policy,
            hear=self._hear,
            on_change=lambda one: self.told.append(one.state),
            start=self._start,
            clock=lambda: self.now,
            rng=random.Random(1),
            **options,  # type: ignore[arg-type]
        )

    def _hear(self, line: str) -> Heard:
        self.told.append(line)
        return hear(line)

    def _start(self, program: Program, wake: Callable[[], None]) -> FakeLife:
        assert program is PROGRAM
        if self.refusal is not None:
            raise self.refusal
        assert all(life.end is not None for life in self.lives)
        self.lives.append(FakeLife(len(self.lives) + 1))
        return self.lives[-1]

    @property
    def life(self) -> FakeLife:
        return self.lives[-1]

    def after(self, seconds: float) -> float | None:
        self.now += seconds
        return self.one.look()

    def dies(self, status: int, *lines: str) -> float | None:
        self.life.die(status, *lines)
        return self.one.look()


def begun(policy: Policy = NO_JITTER, **options: object) -> Bench:
    """A bench whose first process starts."""
    bench = Bench(policy, **options)
    bench.one.look()
    return bench


def test_the_last_line_is_told_before_the_end_and_the_end_before_the_next_start() -> None:
    bench = Bench()
    assert bench.one.look() is None and bench.one.pid == 1
    bench.life.say("hello", "serves")
    bench.life.die(1, "the cause", "")
    assert bench.after(1.0) == pytest.approx(0.5)
    assert bench.told == ["starting", "hello", "serves", "serving", "the cause", "", "pausing"]
    assert bench.one.ended == Ended(name="it", status=1, how="ended with 1", cause="the cause", then=0.5)
    assert str(bench.one.ended) == "the it ended with 1; it starts again in 0.5 s"
    assert bench.one.pid == 0
    assert bench.after(0.4) == pytest.approx(0.1)
    assert bench.after(0.1) is None
    assert (bench.one.pid, bench.one.num_starts, bench.one.state) == (2, 2, State.STARTING)


def test_the_pause_depends_on_how_long_the_process_took_to_serve_and_served() -> None:
    bench = begun()
    pauses: list[float | None] = []
    for starts, serves in ((4.0, 3.9), (4.0, 4.0), (4.0, 2.0)):
        bench.now += starts
        bench.life.say("serves")
        bench.one.look()
        bench.life.die(1)
        bench.after(serves)
        assert bench.one.ended is not None
        pauses.append(bench.one.ended.then if not isinstance(bench.one.ended.then, GiveUp) else None)
        bench.after(30.0)
    assert pauses == [0.5, 0.0, 0.5]


def test_a_process_that_serves_is_known_from_elsewhere_too() -> None:
    bench = begun()
    bench.one.mark_serving()
    bench.dies(1)
    assert bench.told == ["starting", "serving", "pausing"]
    # What is said of the last process means nothing for the next one.
    bench.one.mark_serving()
    bench.after(0.5)
    assert bench.one.state == State.STARTING


def test_a_program_that_cannot_be_started_is_tried_again_or_given_up_with_the_cause() -> None:
    cause = "Resource temporarily unavailable"
    bench = Bench()
    bench.refusal = OSError(11, cause)
    bench.one.look()
    assert str(bench.one.failure()) == f"the it could not be started before it served: {cause}"
    bench = begun()
    bench.dies(1, "serves")
    bench.refusal = OSError(11, cause)
    for _ in range(4):
        assert bench.one.state == State.PAUSED
        bench.after(30.0)
    again = "5 times within 60 s; it is not started again"
    bench = begun(Policy(jitter=False, max_ends=5, last_pause_seconds=0.5))
    bench.dies(1, "serves")
    bench.refusal = OSError(11, cause)
    for _ in range(4):
        bench.after(0.5)
    assert str(bench.one.failure()) == f"the it could not be started, {again}: {cause}"


def test_nothing_starts_before_there_is_a_program() -> None:
    bench = Bench()
    bench.program = None
    assert bench.one.look() is None and not bench.lives
    bench.program = PROGRAM
    bench.one.hurry()
    bench.one.look()
    assert len(bench.lives) == 1


def test_a_pause_ends_when_it_must() -> None:
    bench = begun(Policy(jitter=False, needs_service=False, first_pause_seconds=20.0))
    bench.life.die(1)
    assert bench.after(1.0) == 20.0
    bench.one.hurry()
    bench.one.look()
    assert bench.one.state == State.STARTING


def test_a_process_that_was_given_up_starts_again_when_asked() -> None:
    bench = begun()
    assert not bench.one.retry()
    bench.dies(2, "no such flag")
    failure = bench.one.failure()
    assert str(failure) == "the it ended with 2: no such flag" and failure.wrong_settings and not failure.in_order
    assert bench.after(1e6) is None and len(bench.lives) == 1
    assert bench.one.retry()
    bench.one.look()
    assert bench.one.state == State.STARTING and len(bench.lives) == 2
    bench.dies(2)
    bench.one.stop(1.0)
    bench.one.retry()
    bench.one.look()
    assert bench.one.state == State.STOPPED and not bench.one.retry() and len(bench.lives) == 2


def test_a_process_is_asked_to_end_and_killed_after_the_grace() -> None:
    bench = begun()
    bench.one.stop(3.0)
    assert bench.one.look() == 3.0 and bench.life.signals == [STOP]
    bench.after(2.9)
    assert bench.life.signals == [STOP]
    bench.after(0.1)
    assert bench.life.signals == [STOP, signal.SIGKILL]
    assert bench.one.look() is None
    assert bench.told[-1] == State.STOPPED and bench.one.ended is not None and bench.one.ended.status == -9
    assert str(bench.one.ended) == "the it did not end within 3 s and was killed: it printed nothing"


def test_a_process_that_is_the_last_one_is_not_replaced() -> None:
    bench = begun()
    bench.one.start_no_more()
    assert bench.after(1e6) is None and bench.life.signals == []
    bench.dies(1)
    bench.after(1e6)
    assert bench.one.state == State.STOPPED and len(bench.lives) == 1


def test_who_says_in_each_look_that_a_process_is_the_last_one_is_woken_once() -> None:
    bench, woken = begun(), list[None]()
    bench.one.wake = lambda: woken.append(None)
    for _ in range(5):
        bench.one.start_no_more()
        bench.one.look()
    assert len(woken) == 1


def test_a_silent_process_is_killed_and_a_stalled_driver_blames_nobody() -> None:
    silences: list[float] = []
    bench = begun(silence_seconds=3.0, on_silence=lambda: silences.append(bench.now))
    for _ in range(10):  # one that starts may be silent
        assert bench.after(0.9) == 0.5
    bench.life.say("serves")
    for line in ("", "alive", "words"):
        bench.after(0.9)
        bench.life.say(line)
        bench.after(0.9)
    assert not silences and "alive" not in bench.one.lines
    bench.after(100.0)
    for _ in range(3):
        bench.after(0.9)
    assert not silences and not bench.life.signals
    bench.after(0.9)
    assert len(silences) == 1 and bench.life.signals == [signal.SIGKILL]
    bench.after(0.1)
    assert bench.told[-2:] == [State.PAUSED, State.STARTING]


class Machine(RuleBasedStateMachine):
    """Events in any order: one process at a time, and nothing after a stop."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(Policy(max_ends=3, needs_service=False, first_pause_seconds=1.0), silence_seconds=5.0)
        self.is_stopping, self.num_at_stop = False, 0

    @rule(seconds=floats(0.0, 3.0))
    def look(self, seconds: float) -> None:
        due = self.bench.after(seconds)
        assert due is None or due >= 0.0
        again = self.bench.one.look()
        # What was due is done.
        assert due is None or again is None or again <= due or due == 0.0
        if self.is_stopping:
            assert len(self.bench.lives) == self.num_at_stop

    @precondition(lambda self: self.bench.one.pid)
    @rule(line=sampled_from(["serves", "alive", "words"]))
    def say(self, line: str) -> None:
        self.bench.life.say(line)

    @precondition(lambda self: self.bench.one.pid)
    @rule(status=integers(-9, 3))
    def die(self, status: int) -> None:
        self.bench.life.die(status)

    @rule(verb=sampled_from(["hurry", "retry", "mark_serving", "kill"]))
    def ask(self, verb: str) -> None:
        getattr(self.bench.one, verb)()

    @rule(grace=sampled_from([None, 0.0, 2.0]))
    def stop(self, grace: float | None) -> None:
        if grace is None:
            self.bench.one.start_no_more()
        else:
            self.bench.one.stop(grace)
        if not self.is_stopping:
            self.bench.one.look()
            self.is_stopping, self.num_at_stop = True, len(self.bench.lives)

    @invariant()
    def the_state_is_that_of_the_process(self) -> None:
        one = self.bench.one
        runs = one.state in (State.STARTING, State.SERVING)
        assert bool(one.pid) == runs
        assert sum(life.end is None for life in self.bench.lives) == int(runs)
        assert one.num_starts == len(self.bench.lives)
        assert one.state != State.GIVEN_UP or (one.ended is not None and isinstance(one.ended.then, GiveUp))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def supervised(code: str, policy: Policy = NO_JITTER, said: list[str] | None = None) -> Supervisor:
    def program() -> Program:
        return Program(argv=(sys.executable, "-c", f"import os, signal, subprocess, sys\n{code}"))

    def on_change(one: Supervisor) -> None:
        if said is not None and one.state in (State.PAUSED, State.GIVEN_UP):
            said.append(str(one.ended))

    return Supervisor("it", program, policy, hear=hear, on_change=on_change)


SERVES = "print('serves', flush=True); signal.pause()"


def driven(one: Supervisor) -> threading.Thread:
    """Starts a thread that keeps the process running; returns it when the process serves."""
    driver = threading.Thread(target=run, args=(one,))
    driver.start()
    until(lambda: one.state == State.SERVING)
    return driver


def test_a_task_keeps_a_process_running_until_it_is_stopped() -> None:
    said = list[str]()
    one = supervised(SERVES, Policy(first_pause_seconds=0.01), said)

    async def play() -> None:
        running = asyncio.create_task(run_async(one))

        async def serves(num: int) -> None:
            while not (one.state == State.SERVING and one.num_starts == num):
                await asyncio.sleep(0.01)

        await serves(1)
        one.kill()
        await serves(2)
        one.stop(TIMEOUT_SECONDS)
        await asyncio.wait_for(running, TIMEOUT_SECONDS)

    asyncio.run(play())
    assert said == ["the it was ended by SIGKILL; it starts again in 0.0 s"]
    assert one.ended is not None and one.ended.status == -STOP


def test_a_task_ends_with_what_its_process_said_last() -> None:
    one = supervised("print('no such flag'); sys.exit(2)")
    with pytest.raises(ServiceEnded, match=r"^the it ended with exit code 2: no such flag$") as ended:
        asyncio.run(run_async(one))
    assert ended.value.wrong_settings


def test_a_process_that_somebody_has_frozen_ends_after_the_grace() -> None:
    """SIGSTOP: the order to end waits with it."""
    one = supervised(SERVES)
    driver = driven(one)
    one.signal(signal.SIGSTOP)
    until(lambda: psutil.Process(one.pid).status() == psutil.STATUS_STOPPED)
    one.stop(0.2)
    driver.join(TIMEOUT_SECONDS)
    assert str(one.ended) == "the it did not end within 0.2 s and was killed: serves"
    assert one.ended is not None and (one.ended.status, one.state) == (-signal.SIGKILL, State.STOPPED)


@pytest.mark.parametrize("looks", [1, 3])
def test_a_pause_ends_when_a_process_is_needed_at_once(looks: int) -> None:
    answers = [False] * (looks - 1) + [True]
    one = supervised("sys.exit(1)", Policy(first_pause_seconds=1e6, needs_service=False, max_ends=2))

    async def is_urgent() -> bool:
        return answers.pop(0)

    with pytest.raises(ServiceEnded, match="2 times"):
        asyncio.run(run_async(one, is_urgent))
    assert not answers


def test_a_thread_keeps_a_process_running_until_another_stops_it() -> None:
    one = supervised(SERVES, Policy(first_pause_seconds=0.01))
    driver = driven(one)
    one.kill()
    until(lambda: one.state == State.SERVING and one.num_starts == 2)
    one.stop(TIMEOUT_SECONDS)
    driver.join(TIMEOUT_SECONDS)
    assert not driver.is_alive() and one.state == State.STOPPED


USER = """
import asyncio, ctypes, sys
from tandem_contract.child import Program, python, reap_orphans
from tandem_contract.processes import Heard, Policy, Supervisor, run_async
if "subreaper" in sys.argv:
    assert ctypes.CDLL(None).prctl(36, 1) == 0
    reap_orphans()
# It has a child in its session and one that left, both of which end with it.
LEASH = "import ctypes; ctypes.CDLL(None).prctl(1, 9); "
code = '''
import signal, subprocess, sys
sleeps = "import ctypes, signal; ctypes.CDLL(None).prctl(1, 9); print('up', flush=True); signal.pause()"
for own in (False, True):
    subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=own, stdout=subprocess.PIPE).stdout.readline()
print("serves", flush=True)
signal.pause()
'''
def hear(line):
    print(line, flush=True)
    return Heard.SERVES if line == "serves" else Heard.WORDS
program = lambda: Program(argv=(sys.executable, "-c", LEASH + code))
asyncio.run(run_async(Supervisor("it", program, Policy(first_pause_seconds=0.01), hear=hear)))
"""
_PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux only")
@pytest.mark.parametrize("adopts", ["", "subreaper", "process 1"])
def test_a_process_that_is_killed_leaves_no_zombie_and_a_user_that_is_killed_no_process(adopts: str) -> None:
    within = _PROCESS_1 if adopts == "process 1" else ()
    if within and subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not be process 1 of others")
    popen = subprocess.Popen(
        [*within, sys.executable, "-c", USER, adopts], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert popen.stdout is not None
    left: list[psutil.Process] = []
    try:
        assert popen.stdout.readline() == "serves\n"
        user = psutil.Process(popen.pid).children()[0] if within else psutil.Process(popen.pid)
        killed = user.children(recursive=True)
        assert len(killed) == 3
        for each in killed:
            with suppress(psutil.NoSuchProcess):
                each.kill() if each.ppid() == user.pid else None
        assert popen.stdout.readline() == "serves\n"
        # A zombie runs, as psutil sees it; without a process that adopts orphans, the system's process 1 reaps them.
        until(lambda: not any(each.is_running() for each in (killed if adopts else killed[:1])), "no zombie")
        left = user.children(recursive=True)
        assert len(left) == 3 and all(each.status() != psutil.STATUS_ZOMBIE for each in left)
        user.kill()
        popen.wait(TIMEOUT_SECONDS)
        until(
            lambda: all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in left), "no orphans"
        )
    finally:
        popen.kill()
        popen.communicate()
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
