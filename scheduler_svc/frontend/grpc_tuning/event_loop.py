"""Owns how the process of a front end runs: its event loop, its threads, the coroutine of a write, and its heap.

The event loop is asyncio's own, which takes many of gRPC's wake-ups at once. grpc.aio has a thread that queues finished
operations and writes a byte to a socket for each of them. Its callback on the event loop reads one byte and handles
every queued operation, so the other bytes cause turns of the loop that find nothing, about 15 us for each message sent.
This loop reads those bytes too. The names below are those of grpcio 1.85.1; with other names, or if the bytes cannot be
counted, the callback runs as it is.

The coroutine of a write runs without a task, because a task's switch costs more than the write, or as a task.
"""

import array
import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import socket
import termios
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

_M_ARENA_MAX = -8


def has_heaps() -> bool:
    """Whether the C library has the setting; only glibc has it."""
    return hasattr(ctypes.CDLL(None), "mallopt")


def use_one_heap() -> None:
    """Lets all threads share one heap, if that is possible. Call it before other threads start.

    glibc gives threads heaps of their own, up to eight for each core, and does not use the free memory of one for
    another. gRPC takes and frees the memory of messages in different threads: after 1,000 calls of 4 MB that stalled,
    64 at a time, a front end had 580 MB with many heaps and 370 MB with one.
    """
    if has_heaps():
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


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


End = Callable[[BaseException | None], None]
Run = Callable[[Coroutine[Any, Any, None], End], None]

# The event loop itself keeps only weak references.
_tasks: set["asyncio.Task[None]"] = set()


def run_here(coroutine: Coroutine[Any, Any, None], on_end: End, _: object = None) -> None:
    """Runs it in the caller's turn, and then each future that it waits for continues it. `on_end` gets its error."""
    try:
        future = coroutine.send(None)
    except StopIteration:
        on_end(None)
    except (Exception, asyncio.CancelledError) as error:
        on_end(error)
    else:
        # As a task does: the future then knows that it is waited for.
        future._asyncio_future_blocking = False
        future.add_done_callback(functools.partial(run_here, coroutine, on_end))


def run_as_task(coroutine: Coroutine[Any, Any, None], on_end: End) -> None:
    """Runs it as a task, from the next turn on. `on_end` gets its error."""

    def end(ended: "asyncio.Task[None]") -> None:
        _tasks.discard(ended)
        on_end(asyncio.CancelledError() if ended.cancelled() else ended.exception())

    task = asyncio.get_running_loop().create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(end)
