"""The descriptors that the process of a test has open.

Tests share a process, and what one leaves in a cycle of references is closed at whatever time it is collected.
"""

import gc
import os


def open_descriptors() -> set[int]:
    """Returns their numbers once all garbage is collected, so that two results differ by what happened in between."""
    gc.collect()
    # What is alive now is read by no later collection: in a process that has run many tests one takes half a second.
    gc.freeze()
    # The number of the listing itself may differ from call to call.
    listing = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return set(map(int, os.listdir(listing))) - {listing}
    finally:
        os.close(listing)
