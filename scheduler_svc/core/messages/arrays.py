"""Array types of the core's messages, empty arrays for fields without values, and a check of the values of an array."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

NO_IDS = np.zeros(0, np.int32)
NO_PAGES = np.zeros(0, np.int32)
NO_FLOATS = np.zeros(0, np.float32)


def is_within(values: Int32Array, limit: int) -> bool:
    """Returns whether all values are from 0 to `limit - 1`."""
    if not len(values):
        return True
    # Read as unsigned, a negative number is above any limit. `argmax` takes half the time of `max`.
    unsigned = values.view(np.uint32)
    return int(unsigned[unsigned.argmax()]) < limit
