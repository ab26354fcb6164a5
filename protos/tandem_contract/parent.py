"""Ends this process with the one that started it. Owns the variable by which a program learns who that is."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Has the id of the process that started this one. When this one asks the system, that one may be dead already, and
# another process in its place.
PARENT = "_TANDEM_PARENT"


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, also if the parent is killed. Linux only.

    Ends the process at once if the parent has ended already. Raises OSError.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)
