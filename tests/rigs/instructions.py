"""Lets a second thread look between any two instructions of the first, without threads: each order is tried once.

Owns the tracing. What it cannot show is the order in which another CPU sees two writes.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def at_every_instruction(work: Callable[[], object], look: Callable[[], object], *modules: Any) -> int:
    """Does the work, and calls `look` before each instruction of functions of `modules`. Returns how often."""
    files = {module.__file__ for module in modules}
    num_looks = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_looks
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_looks += 1
            look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_looks
