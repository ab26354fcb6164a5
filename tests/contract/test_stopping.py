"""The senders of signals that stop a program: signals from outside are counted, those of a parent are not."""

import os
import signal
import subprocess
import sys
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any

import pytest

from tandem_contract.processes import GiveUp, OnZero, Policy, Restart
from tandem_contract.stopping import STOP, STOP_NOW, Asked, StopRequests
from tests.rigs.processes import child_environment

NEW, ONE, TWO = Asked.NOTHING, Asked.STOP, Asked.STOP_NOW
ANNOUNCED = 0


@pytest.mark.parametrize(
    ("heard", "asked"),
    [
        ([], NEW),
        # A supervisor of the system, a terminal, a closed terminal, a parent: each alone.
        ([SIGTERM], ONE),
        ([SIGINT], ONE),
        ([SIGHUP], ONE),
        ([STOP], ONE),
        ([STOP_NOW], TWO),
        # All processes got the signal, and the parent gives its word: in both orders, however often.
        ([SIGTERM, ANNOUNCED, STOP], ONE),
        ([STOP, ANNOUNCED, STOP, STOP], ONE),
        ([SIGINT, STOP, ANNOUNCED, STOP], ONE),
        ([STOP, ANNOUNCED, SIGTERM], ONE),
        ([STOP, ANNOUNCED, SIGINT, STOP], ONE),
        ([SIGTERM, ANNOUNCED, STOP, STOP_NOW], TWO),
        # A program between hands on a signal that all got. systemd's SendSIGHUP comes after SIGTERM.
        ([SIGINT, SIGINT, SIGTERM, ANNOUNCED], ONE),
        ([SIGTERM, ANNOUNCED, SIGHUP], ONE),
        # The operator once more.
        ([SIGTERM, ANNOUNCED, SIGTERM], TWO),
        ([SIGINT, ANNOUNCED, SIGTERM], TWO),
        ([STOP, ANNOUNCED, SIGINT, SIGINT], TWO),
        ([SIGHUP, ANNOUNCED, SIGINT], TWO),
        ([SIGTERM, ANNOUNCED, SIGTERM, STOP], TWO),
    ],
)
def test_what_is_asked_for(heard: list[int], asked: Asked) -> None:
    requests = StopRequests()
    assert not requests.announce()
    for number in heard:
        if number == ANNOUNCED:
            assert requests.announce()
        else:
            requests.heard(number)
    assert requests.asked == asked


def test_a_stop_is_announced_once() -> None:
    requests = StopRequests()
    requests.heard(SIGTERM)
    assert [requests.announce(), requests.announce()] == [True, False]


@pytest.mark.parametrize("number", [SIGTERM, SIGINT, SIGHUP, STOP])
@pytest.mark.parametrize(
    ("on_zero", "then"),
    [
        (OnZero.AGAIN, 0.5),
        (OnZero.CRASH, 0.5),
        (OnZero.WANTED, GiveUp(" because it was stopped", in_order=True)),
    ],
)
def test_a_program_that_somebody_stopped_during_its_start_is_not_at_fault(
    number: int, on_zero: OnZero, then: float | GiveUp
) -> None:
    restart = Restart(Policy(on_zero=on_zero, jitter=False))
    assert restart.decide(at=1.0, status=-number, ever_served=False, start_seconds=1.0, served_seconds=0.0) == then


START = """
import os, signal, sys, time
from tandem_contract import stopping
{before}
stopping.begin()
print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)
{after}
"""


def start(
    before: str = "", after: str = "signal.pause()", command: tuple[str, ...] = (), **options: Any
) -> subprocess.Popen[str]:
    """A program in a session without a terminal."""
    return subprocess.Popen(
        [*command, sys.executable, "-c", START.format(before=before, after=after)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=child_environment(),
        **options,
    )  # fmt: skip


def line_of(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_a_signal_during_the_start_ends_the_program_without_a_traceback(number: int) -> None:
    program = start()
    assert line_of(program) == "True"
    program.send_signal(SIGHUP)
    program.send_signal(number)
    assert program.communicate(timeout=60) == ("", None)
    assert program.returncode == -number


def test_a_terminal_that_is_closed_asks_for_a_stop() -> None:
    ours, theirs = os.openpty()
    # A parent that ignores SIGHUP, as under nohup, hands that on.
    heard = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    before = f"import fcntl, termios; fcntl.ioctl({theirs}, termios.TIOCSCTTY, 0); {heard}"
    after = "requests = stopping.StopRequests(); requests.listen(lambda: print(requests.asked.name, flush=True))"
    waits = "print('listens', flush=True); signal.pause()"
    program = start(before, f"{after}; {waits}", pass_fds=[theirs])
    os.close(theirs)
    assert [line_of(program), line_of(program)] == ["False", "listens"]
    os.close(ours)
    assert line_of(program) == "STOP"
    program.kill()
    program.communicate(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are Linux's")
def test_process_1_of_a_container_ends_at_the_first_signal_of_its_start() -> None:
    unshare = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a PID namespace")
    # Process 1 has no default actions for signals of its own namespace, but a child of it sends them.
    sends = "child = os.fork()\nif not child: os.kill(1, signal.SIGTERM); os._exit(0)\ntime.sleep(60)"
    program = start(after=sends, command=unshare)
    assert program.communicate(timeout=60) == ("True\n", None)
    assert program.returncode == 128 + signal.SIGTERM


def test_a_signal_that_another_thread_gets_wakes_the_loop() -> None:
    """The kernel may give it to any thread; the main thread is as deaf at the moment before it waits."""
    after = """import asyncio, threading
async def main():
    requests, heard = stopping.StopRequests(), asyncio.Event()
    requests.listen_in(asyncio.get_running_loop(), heard.set)
    def send():
        # While this thread sleeps, the main thread waits for the loop's events alone.
        state = "R"
        while state != "S":
            time.sleep(0.05)
            state = open("/proc/self/stat").read().rpartition(")")[2].split()[0]
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Thread(target=send).start()
    await heard.wait()
    print(requests.asked.name, flush=True)
asyncio.run(main())
asyncio.run(main())
"""
    program = start(after=after)
    try:
        assert program.communicate(timeout=20) == ("True\nSTOP\nSTOP\n", None)
    finally:
        program.kill()
