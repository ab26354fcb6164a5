"""Array types of the core's messages, empty arrays for fields without values, and checks of the values of an array."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

NO_IDS = np.zeros(0, np.int32)
NO_STREAMS = np.zeros(0, np.uint64)
NO_FLOATS = np.zeros(0, np.float32)


def is_within(values: Int32Array, limit: int) -> bool:
    """Returns whether all values are from 0 to `limit - 1`."""
    if not len(values):
        return True
    # Read as unsigned, a negative number is above any limit. `argmax` takes half the time of `max`.
    unsigned = values.view(np.uint32)
    return int(unsigned[unsigned.argmax()]) < limit


def is_any_of(ids: Int32Array, values: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Returns `np.isin(ids, values)`; for few values comparisons are faster."""
    if len(values) > 8:
        return np.isin(ids, values)
    if not values:
        return np.zeros(len(ids), np.bool_)
    is_equal = ids == values[0]
    for one in values[1:]:
        is_equal |= ids == one
    return is_equal
