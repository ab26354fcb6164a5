"""Ends this process with its parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, also if the parent is killed. Linux only."""
    parent = os.getppid()
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before the call.
    if os.getppid() != parent:
        sys.exit(1)
