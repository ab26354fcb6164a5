"""The phases of a start: their durations in the log, and the name of the one that began last. Imports nothing heavy."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

log = logging.getLogger("gpu_worker.startup")
# A step of start-up that takes longer has compiled or loaded kernels.
_SLOW_SECONDS = 0.5
_last_phase = "imports"
_follow: Callable[[str], None] | None = None


def on_phase(follow: Callable[[str], None]) -> None:
    """Calls `follow` with the name of the last phase, and with that of each phase that begins from now on."""
    global _follow
    _follow = follow
    follow(_last_phase)


def begin_phase(name: str) -> None:
    global _last_phase
    _last_phase = name
    if _follow is not None:
        _follow(name)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    begin_phase(name)
    begun = time.perf_counter()
    yield
    log_phase(name, time.perf_counter() - begun)


def log_phase(name: str, seconds: float) -> None:
    log.info("%-36s %7.2f s", name, seconds)


def log_slow_phase(name: str, seconds: float) -> None:
    """Logs the duration of a step that compiled something; a GPU warms up in dozens of steps."""
    if seconds >= _SLOW_SECONDS:
        log_phase(name, seconds)
