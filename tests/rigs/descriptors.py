"""The descriptors that the process of a test has open.

Tests share a process, and what others left is closed at any time: in a cycle of references when it is collected, or by
a thread of ZeroMQ or gRPC. So nothing is said about descriptors that were open before.
"""

import contextlib
import gc
import os

# Its number and what it is open for: a number is taken again by the next one.
Descriptor = tuple[int, str]


def open_descriptors() -> set[Descriptor]:
    """Returns them once all garbage is collected."""
    gc.collect()
    # What is alive now is read by no later collection: in a process that has run many tests one takes half a second.
    gc.freeze()
    found = set[Descriptor]()
    for number in os.listdir("/proc/self/fd"):
        # The listing's own is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def memory_closed_since(before: set[Descriptor]) -> list[str]:
    """Returns which memory without a file has been closed since, sorted. No library of the tests has such memory."""
    return sorted(target for _, target in before - open_descriptors() if target.startswith("/memfd:"))


def opened_since(before: set[Descriptor]) -> list[str]:
    """Returns what has been opened since and is still open, sorted."""
    return sorted(target for _, target in open_descriptors() - before)
