"""Owns the event loop of the front end: asyncio's own, which takes many of gRPC's wake-ups at once; and its threads.

grpc.aio has a thread that queues finished operations and writes a byte to a socket for each of them. Its callback on
the event loop reads one byte and handles every queued operation, so the other bytes cause turns of the loop that find
nothing, about 15 us for each message sent. This loop reads those bytes too. The names below are those of grpcio 1.85.1;
with other names, or if the bytes cannot be counted, the callback runs as it is.
"""

import array
import asyncio
import contextlib
import fcntl
import functools
import os
import socket
import termios
import threading
from collections.abc import Callable, Generator
from typing import Any

# The owner of the callback that reads one byte and handles all operations.
QUEUE = "PollerCompletionQueue"


class FrontEndLoop(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=FrontEndLoop)` uses it."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """As asyncio's. gRPC's callback is wrapped."""
        owner = getattr(getattr(callback, "func", None), "__self__", None)
        if isinstance(fd, socket.socket) and type(owner).__name__ == QUEUE:
            callback = functools.partial(drain, fd, callback)
        super().add_reader(fd, callback, *args)


def drain(source: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Reads all bytes but one, then calls `callback`, which reads the last one."""
    count = array.array("i", [0])
    fcntl.ioctl(source, termios.FIONREAD, count)
    if count[0] > 1:
        source.recv(count[0] - 1)
    callback(*args)


@contextlib.contextmanager
def patient_threads(*, is_on: bool) -> Generator[None]:
    """Threads that Python starts inside do not interrupt another thread when they wake up: SCHED_BATCH, on Linux.

    gRPC's thread for finished operations would otherwise interrupt the event loop after each message, for some 20 us.
    It runs when the loop waits or another core is free.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if is_on and thread.native_id is not None and hasattr(os, "SCHED_BATCH"):
            # A container may forbid it. The thread may have ended.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
