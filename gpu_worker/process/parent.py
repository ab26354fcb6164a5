"""Ends this process with the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Has the id of the process that started this one, which may be dead before this one can ask who its parent is.
PARENT = "_TANDEM_PARENT"


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, so that no orphan holds a device. Raises OSError.

    Ends the process at once if the parent has ended already.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)
