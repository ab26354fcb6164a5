"""Work at a low CPU priority in a process that needs the normal one afterwards.

A process without privileges cannot raise its priority again. Two ways around this, used together:

- The kernel keeps a nice value per thread, and new threads get that of their creator. So the work runs in a thread of
  its own; OpenMP's threads belong to the thread that started them, so another thread gets new ones.
- If the kernel groups tasks by session (sched_autogroup), nice values count within a session only, and sessions share
  the CPU by the value in /proc/self/autogroup (sched(7)), which may be set back to 0.

Owns both. Imports no torch.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_NICE = 10
_AUTOGROUP = Path("/proc/self/autogroup")

_Result = TypeVar("_Result")


def at_low_priority(work: Callable[[], _Result]) -> _Result:
    """Does the work in another thread with a low CPU priority. Returns its result, or raises its exception."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            os.nice(_NICE)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon, so that an interrupt ends the process.
    thread = threading.Thread(target=run, name="low-priority", daemon=True)
    with _session_at_low_priority():
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _session_at_low_priority() -> Iterator[None]:
    """Lowers the priority of this process's session, unless the session belongs to another process."""
    # Some kernels have no groups of sessions, and containers may have a read-only /proc.
    with contextlib.suppress(OSError):
        if os.getsid(0) == os.getpid():
            _AUTOGROUP.write_text(str(_NICE))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.getsid(0) == os.getpid():
                _AUTOGROUP.write_text("0")
