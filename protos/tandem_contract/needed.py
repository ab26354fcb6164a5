"""Threads and tasks without which a program would go on and do nothing.

What one of them raises ends the program at once, as a crash does: with the traceback in the log and a last line. What
others raise is only logged. It holds where a program's main function runs (`ends_with_needed`), not where a program
uses the client: there a thread only ends itself.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger("tandem")
# The program's name while it ends with them.
_program = ""
_AnyThread = TypeVar("_AnyThread", bound=threading.Thread)


class NeededThread(threading.Thread):
    """Runs `target` until the program ends, or until `target` returns."""

    def __init__(self, *, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def started(thread: _AnyThread) -> _AnyThread:
    """Starts the thread and returns it. Raises OSError while the system allows no further one."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from None
    return thread


def needed_task(work: Coroutine[Any, Any, object], name: str) -> "asyncio.Task[object]":
    """Creates a task of the running loop that is needed like a NeededThread."""
    import asyncio

    def ended(task: "asyncio.Task[object]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _failed(f"task {name}", error, is_needed=True)

    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(ended)
    return task


@contextmanager
def ends_with_needed(program: str) -> Generator[None]:
    """While the body runs, something needed that fails ends this program; `program` is its name in the last line.

    Also a decorator, of the main functions of programs.
    """
    global _program
    before = _program, threading.excepthook
    _program, threading.excepthook = program, _thread_failed
    try:
        yield
    finally:
        _program, threading.excepthook = before


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Replaces `threading.excepthook`."""
    name = "that has ended" if failed.thread is None else failed.thread.name
    error = failed.exc_value or failed.exc_type()
    _failed(f"thread {name}", error, is_needed=isinstance(failed.thread, NeededThread))


def _failed(which: str, error: BaseException, *, is_needed: bool) -> None:
    from tandem_contract import logs

    _log.critical("uncaught exception in %s", which, exc_info=error)
    if not is_needed or not _program:
        return
    cause = f"the {which} failed, and nothing goes on without it: {type(error).__name__}: {error}"
    line = logs.closing_line(_program, cause)
    # This may be the thread of the log.
    with contextlib.suppress(Exception):
        logs.stop()
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))
    # Nothing else is asked: the program that watches this process handles it as any crash.
    os._exit(1)
