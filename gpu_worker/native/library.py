"""The C++ kernels of a CPU as Python functions of addresses and sizes.

Owns the loaded library. Its callers declare the functions. Knows nothing of attention, models or steps.
"""

import ctypes
import logging
import time
from functools import cache
from pathlib import Path
from typing import Any

# Torch loads its own OpenMP library for the whole process, so it is imported first: the kernels then share its threads.
import torch  # noqa: F401

from gpu_worker.native.build import NotBuilt, best_instruction_set, built_library, cpu_flags
from gpu_worker.native.calls import NativeFunction

log = logging.getLogger(__name__)

_are_left_out = False


class NativeLibrary:
    """One compiled library. Its functions check no argument: callers pass tensors of the documented shapes."""

    def __init__(self, path: Path, instructions: str) -> None:
        self.instructions = instructions
        self.functions = ctypes.CDLL(str(path))
        self.functions.tandem_lanes.restype = ctypes.c_int32
        self.lanes: int = self.functions.tandem_lanes()

    def function(self, name: str, *types: Any) -> NativeFunction:
        """A function that can be recorded; see NativeFunction."""
        return NativeFunction(self.functions, name, *types)


def leave_out_kernels() -> None:
    """Makes `native_library` return None in this process. Call it before anything asks for the library."""
    global _are_left_out
    _are_left_out = True
    native_library.cache_clear()


@cache
def native_library() -> NativeLibrary | None:
    """The kernels for this machine, built if necessary; None if that fails, and the log says why."""
    if _are_left_out:
        return None
    begun = time.perf_counter()
    try:
        instructions = best_instruction_set(cpu_flags())
        found = NativeLibrary(built_library(instructions), instructions.name)
    except (NotBuilt, OSError) as error:
        log.warning("torch's operators compute attention, linear layers and the rest, more slowly: %s", error)
        return None
    log.info("C++ kernels for %s: %.2f s", found.instructions, time.perf_counter() - begun)
    return found
