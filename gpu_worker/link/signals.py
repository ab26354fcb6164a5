"""SIGTERM and SIGINT as a readable socket, because a signal does not end a poll. Owns both handlers while in use."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_wake(stop: Callable[[], None]) -> Iterator[socket.socket]:
    """SIGTERM and SIGINT call `stop` and make the yielded socket readable, so that a poll returns.

    The second of these signals ends the process at once, with the status of that signal.
    """

    def on_signal(signum: int, frame: FrameType | None) -> None:
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_DFL)
        stop()

    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    previous_fd = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, on_signal) for number in _NUMBERS}
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        wake.close()
        woken.close()
