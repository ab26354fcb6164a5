"""The terminal between two prompts: keys are not echoed into an answer, and wait for the next prompt.

Ctrl-C still interrupts, and drops them. The prompt switches to its own mode and back.
"""

import contextlib
import sys
import termios
from collections.abc import Generator


@contextlib.contextmanager
def without_echo() -> Generator[None, None, None]:
    """Switches the echo of standard input off."""
    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    silent = [*before]
    # The prompt reads single keys. In lines, Enter and Ctrl-D would not reach it as such.
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    # TCSADRAIN keeps what was typed ahead.
    termios.tcsetattr(handle, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
