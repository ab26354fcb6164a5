"""Starts the ranks of a group on this host, and starts them again if the group is lost.

Owns the decision what follows the end of a rank: a refused start ends the launcher with the exit code of the rank that
refused; anything else is a loss, after which the group starts again. In a group on several hosts each has a launcher;
one that is left waits until the others are back (`agent.py`).
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from gpu_worker.group.hosts import Meeting
from gpu_worker.group.words import REFUSED_CODES

log = logging.getLogger(__name__)

# Between starts that end before they serve, growing.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_SERVED_SECONDS = 60.0
_AGENT_LOGS = "torch.distributed.elastic"
_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch(size: int, arguments: Sequence[str], meeting: Meeting, program: str = "gpu_worker") -> int:
    """Runs `python -m PROGRAM ARGUMENTS` as this host's part of `size` ranks until they end in order.

    Returns the exit code.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _few_lines_of_torch():
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from gpu_worker.group.agent import Agent
    # The import has given each a level of its own.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGS)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise SignalException("", sigval=signal.Signals(number))

    for number in _SIGNALS:
        # Later the agent's own, which raise the same.
        signal.signal(number, on_signal)
    agent = Agent(size // meeting.num_hosts, [program, *arguments], meeting)
    try:
        return _until_the_end(agent.start_once, size)
    except SignalException:
        return 0


@contextmanager
def _few_lines_of_torch() -> Iterator[None]:
    """What is imported within writes no warnings of C++ to stderr, with a stack for each lost connection; ranks do."""
    if _CPP_LEVEL in os.environ:
        yield
        return
    os.environ[_CPP_LEVEL] = "ERROR"
    yield
    del os.environ[_CPP_LEVEL]


def _until_the_end(start_once: Callable[[], int], size: int) -> int:
    pause = _FIRST_PAUSE
    while True:
        begun = time.monotonic()
        code = start_once()
        if code == 0 or code in REFUSED_CODES:
            return code
        pause = _FIRST_PAUSE if time.monotonic() - begun > _SERVED_SECONDS else min(2 * pause, _LONGEST_PAUSE)
        log.warning("the group of %d ranks is lost; it starts again in %.1f s", size, pause)
        time.sleep(pause)
