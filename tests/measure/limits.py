"""The limits of this machine's cores, measured: bytes that they read per second, and floating-point operations.

Owns the build of `limits.cpp` and the two measurements. A benchmark compares its figures with limits of the same run.
"""

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from gpu_worker.attention.kv_cache import huge_zeros
from gpu_worker.native import build

# More than the caches have.
_READ_BYTES = 256 << 20
_ROUNDS = 400_000
_REPEATS = 5


@cache
def _library() -> ctypes.CDLL:
    instructions = build.best_instruction_set(build.cpu_flags())
    with tempfile.TemporaryDirectory(prefix="tandem-limits-") as folder:
        path = Path(folder) / "limits.so"
        flags = [*build._FLAGS, *instructions.compiler_flags, f"-I{Path(build.__file__).parent}"]
        source = Path(__file__).with_name("limits.cpp")
        subprocess.run([*build._compiler(), *flags, str(source), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    library.limits_read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    library.limits_read.restype = ctypes.c_float
    for name in ("limits_float32", "limits_bfloat16"):
        if function := getattr(library, name, None):
            function.argtypes = (ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
            function.restype = ctypes.c_int64
    return library


def least_seconds(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    """The shortest time of several calls; others of the machine only ever make one longer."""
    times: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


@cache
def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read in order from memory, the best of several passes."""
    memory = huge_zeros((_READ_BYTES,), torch.uint8).fill_(1)
    library = _library()
    return _READ_BYTES / least_seconds(lambda: library.limits_read(memory.data_ptr(), _READ_BYTES, threads))


@cache
def multiply_rate(dtype: torch.dtype, threads: int) -> float:
    """Floating-point operations per second of `threads` threads, a multiply-add counted as two.

    In float32 if the CPU has no instruction for products of the dtype.
    """
    name = f"limits_{str(dtype).removeprefix('torch.')}"
    function = getattr(_library(), name, _library().limits_float32)
    results = torch.ones(2 + threads)
    operations = function(_ROUNDS, threads, results.data_ptr())
    return operations / least_seconds(lambda: function(_ROUNDS, threads, results.data_ptr()))
