"""SIGTERM and SIGINT as a readable socket, because a signal does not end a poll. Owns both handlers while in use."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_wake(stop: Callable[[], None]) -> Iterator[socket.socket]:
    """SIGTERM and SIGINT call `stop` and make the yielded socket readable, so that a poll returns."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    previous_fd = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        wake.close()
        woken.close()
