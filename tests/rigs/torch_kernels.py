"""Leaves out the C++ kernels in a process, or in a part of one.

Recorders of graphs and the parts of a GPU day see the operators that torch dispatches, as a GPU runs them; the C++
kernels of a CPU are none of those.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_worker.checkpoint.linear import linear_kernel
from gpu_worker.native import library
from gpu_worker.sampling import choice


@contextmanager
def torch_kernels() -> Iterator[None]:
    """What is loaded inside has torch's kernels, also afterwards; what was loaded before keeps its own."""
    was_left_out = library._are_left_out
    library.leave_out_kernels()
    _forget()
    try:
        yield
    finally:
        library._are_left_out = was_left_out
        library.native_library.cache_clear()
        _forget()


def _forget() -> None:
    linear_kernel.cache_clear()
    choice._kernel.cache_clear()
