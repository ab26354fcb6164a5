"""Ends this process with its parent. Owns nothing."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Has the id of the process that started this one, which may be dead before this one can ask who its parent is.
PARENT = "_TANDEM_PARENT"


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, also if the parent is killed. Linux only."""
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before.
    if os.getppid() != parent:
        sys.exit(1)
