"""Starts the ranks of a group on this host, and starts all of them again if one is lost.

Torch's elastic agent, which torchrun is a command line of, starts the processes, notices within 0.1 s that one has
ended, and then ends the others. Owns the decision what follows: a refused start ends the launcher with the exit code of
the rank that refused; anything else is a loss, after which the group starts again. A group over several hosts is
started by torchrun itself on each (README).
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from gpu_worker.group.words import GROUP_LOST
from gpu_worker.process.ranks import RUN_PREFIX

log = logging.getLogger(__name__)

_MONITOR_SECONDS = 0.1
# Between starts that end before they serve, growing.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_SERVED_SECONDS = 60.0
REFUSED_CODES = (1, 2)


def launch(size: int, arguments: Sequence[str], program: str = "gpu_worker") -> int:
    """Runs `python -m PROGRAM ARGUMENTS` as `size` ranks until they end in order. Returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    pause = _FIRST_PAUSE
    while True:
        begun = time.monotonic()
        code = _run_once(size, [program, *arguments])
        if code == 0 or code in REFUSED_CODES:
            return code
        if code < 0 and -code in (signal.SIGTERM, signal.SIGINT):
            return 0
        pause = _FIRST_PAUSE if time.monotonic() - begun > _SERVED_SECONDS else min(2 * pause, _LONGEST_PAUSE)
        log.warning("the group of %d ranks is lost; it starts again in %.1f s", size, pause)
        time.sleep(pause)


def _run_once(size: int, command: Sequence[str]) -> int:
    """The exit code of the rank that ended the group; 0 if all ended in order, negative for a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=f"{RUN_PREFIX}{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", *command)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        log.debug("exit codes of the failed ranks: %s", codes)
        refused = [code for code in codes if code in REFUSED_CODES]
        return refused[0] if refused else GROUP_LOST
    except SignalException as error:
        return -int(error.sigval)
    return 0
