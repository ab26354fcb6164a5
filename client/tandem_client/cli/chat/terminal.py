"""The terminal while an answer is drawn: keys are not echoed into it, and wait for the next prompt."""

import contextlib
import sys
import termios
from collections.abc import Generator


@contextlib.contextmanager
def without_echo() -> Generator[None, None, None]:
    """Switches the echo of standard input off; Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    # TCSADRAIN keeps what was typed ahead.
    termios.tcsetattr(handle, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
