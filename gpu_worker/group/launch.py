"""Starts the ranks of a group on this host, and starts them again if the group is lost.

Owns the decision what follows the end of a rank: a refused start ends the launcher with the exit code of the rank that
refused; anything else is a loss, after which the group starts again. In a group on several hosts each has a launcher;
one that is left waits until the others are back (`agent.py`).
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from gpu_worker.group.hosts import Meeting
from gpu_worker.group.words import REFUSED_CODES

log = logging.getLogger(__name__)

# Between starts that end before they serve, growing.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_SERVED_SECONDS = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch(size: int, arguments: Sequence[str], meeting: Meeting, program: str = "gpu_worker") -> int:
    """Runs `python -m PROGRAM ARGUMENTS` as this host's part of `size` ranks until they end in order.

    Returns the exit code.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from gpu_worker.group.agent import Agent

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
