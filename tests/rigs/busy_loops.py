"""Processes that use all the CPU they get, as other programs on a busy machine do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It ends with the process that started it.
_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """`count` loops run until the context ends, on all cores, wherever this process may run."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        for loop in loops:
            os.sched_setaffinity(loop.pid, range(os.cpu_count() or 1))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
