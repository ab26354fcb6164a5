"""The ways to ask a program to stop.

A supervisor of the system may send its signal to every process at once (systemd does, a terminal does with SIGINT), and
then each program gets it from outside and, a moment later, the word of the program that started it. Both ask for the
same. So a program gives its children other signals than those from outside, and only signals from outside are counted:

    from outside    SIGTERM, SIGINT, SIGHUP of a closed terminal   the first one: stop in order
                    SIGTERM, SIGINT once more                      stop now
    from a parent   SIGUSR1                                        stop in order, however often it comes
                    SIGUSR2                                        stop now

What came before the stop was announced is one signal: some programs hand on a signal that their child got as well. A
parent's word counts as none: the system's signal may come after it. Owns these numbers and the count. What a program
does then is its own.
"""

import functools
import os
import select
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

STOP, STOP_NOW = signal.SIGUSR1, signal.SIGUSR2
_COUNTED = (signal.SIGTERM, signal.SIGINT)
_FROM_OUTSIDE = (*_COUNTED, signal.SIGHUP)


class Asked(IntEnum):
    NOTHING = 0
    STOP = 1
    STOP_NOW = 2


class StopRequests:
    """What one program was asked for since its start. One thread calls its methods, or handlers of signals do."""

    def __init__(self) -> None:
        self.asked = Asked.NOTHING
        self._is_announced, self._is_from_outside = False, False

    def heard(self, number: int) -> None:
        """A signal has come."""
        if number == STOP_NOW or (number in _COUNTED and self._is_announced and self._is_from_outside):
            self.asked = Asked.STOP_NOW
        elif self.asked == Asked.NOTHING:
            self.asked = Asked.STOP
        self._is_from_outside = self._is_from_outside or number in _FROM_OUTSIDE

    def announce(self) -> bool:
        """Returns whether the stop was asked for and is to be announced."""
        is_due = self.asked != Asked.NOTHING and not self._is_announced
        self._is_announced = self._is_announced or is_due
        return is_due

    def listen(self, wake: Callable[[], None] = lambda: None) -> None:
        """Takes the signals in this process's main thread; `wake` is called after each."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.heard(number)
            wake()

        for number in stop_signals():
            signal.signal(number, on_signal)

    def listen_in(self, loop: "AbstractEventLoop", then: Callable[[], None]) -> None:
        """Takes the signals in the main thread's event loop, which calls `then` after each.

        Unlike `add_signal_handler`, this lasts when the loop is closed, so a late word of a parent changes nothing.
        """

        def wake() -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(then)

        hears, woken = _pipe()
        loop.add_reader(hears, os.read, hears, select.PIPE_BUF)
        self.listen(wake)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)


@functools.cache
def _pipe() -> tuple[int, int]:
    """Wakes an event loop that waits. A signal that another thread gets, or the main thread as it begins to wait, does
    not. It is never closed, because a signal may come at any time.
    """
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that ask this process to stop. SIGHUP does where it means that the terminal was closed."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (*_COUNTED, *(() if is_ignored else (signal.SIGHUP,)), STOP, STOP_NOW)


def is_stop(status: int) -> bool:
    """Whether a process with this exit status was ended, during its start, by a signal that asks for a stop."""
    return -status in (*_FROM_OUTSIDE, STOP, STOP_NOW)


def begin() -> None:
    """What each program calls first, before it imports or loads anything that takes long.

    Until the program listens, a signal ends it at once. The kernel does that, but not for process 1 of a container.
    SIGHUP has no meaning without a terminal, because files that change are read again without a signal.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Python's own handler prints a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getpid() == 1:
        for number in stop_signals():
            signal.signal(number, lambda number, frame: os._exit(128 + number))


def end() -> None:
    """What a program calls last: the word of its parent comes too late to change its exit code."""
    for number in (STOP, STOP_NOW):
        signal.signal(number, signal.SIG_IGN)


def leave_to_parent() -> None:
    """Ignores signals from outside in a process that ends with another one, which gets them too."""
    for number in _FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def kept_from_children() -> Generator[None]:
    """Processes that this thread starts meanwhile get no signal that asks to stop: they end with this process.

    This one handles it afterwards. In a fork Python would print and forget what a handler raises.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_FROM_OUTSIDE, STOP, STOP_NOW))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
