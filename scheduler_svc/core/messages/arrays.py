"""Array types of the core's messages, empty arrays for fields without values, and checks of the values of an array."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
RowIndex = Int64Array | slice
Float32Array = npt.NDArray[np.float32]

NO_IDS = np.zeros(0, np.int32)
NO_STREAMS = np.zeros(0, np.uint64)
NO_FLOATS = np.zeros(0, np.float32)


def index_of(rows: Int64Array, *, is_ascending: bool = False) -> RowIndex:
    """Returns an index of arrays for these rows: a slice, which is five times as fast and reads a view, if they follow
    each other, as those of a full lane do. `is_ascending`: the caller knows that the distinct rows ascend."""
    count = len(rows)
    may_follow = count > 0 and int(rows[-1]) - int(rows[0]) == count - 1
    if may_follow and (is_ascending or np.count_nonzero(rows[1:] > rows[:-1]) == count - 1):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


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
