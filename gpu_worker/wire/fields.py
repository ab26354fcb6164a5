"""Raw fields of worker.proto as arrays, each length and range checked.

Owns the wording of these errors: field, value, limit. Knows nothing of the meaning of fields.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem_contract.plural import numbered

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)


class PlanError(ValueError):
    """A plan that cannot be carried out; the message names field, value and limit."""


# Many fields of a plan are empty, and every call of numpy costs about a microsecond.
_INT32 = np.dtype("<i4")
_NO_INTS = np.zeros(0, np.int32)
_NO_FLAGS = np.zeros(0, np.bool_)


def int32_array(data: bytes, name: str, low: int, high: int, size: int | None = None) -> Int32Array:
    """int32 little-endian values, each in low..high; `size` values if it is given."""
    if not data and not size:
        return _NO_INTS
    if len(data) % 4 or (size is not None and len(data) != 4 * size):
        need = (
            f"{numbered(size, 'entry', 'need')} {4 * size}"
            if size is not None
            else "int32 entries need a multiple of 4"
        )
        raise PlanError(f"{name} has {numbered(len(data), 'byte')}; {need}")
    values = np.frombuffer(data, _INT32)
    # The place of an extreme is found in a quarter of the time that the extreme itself takes.
    if values[values.argmin()] < low or values[values.argmax()] > high:
        wrong = values[(values < low) | (values > high)][0]
        raise PlanError(f"{name} contains {wrong}; it must be {low} to {high}")
    return values


def flags(data: bytes, name: str, size: int) -> NDArray[np.bool_]:
    """`size` bytes of 0 or 1."""
    if not data and not size:
        return _NO_FLAGS
    values = np.frombuffer(data, np.uint8)
    if values.size != size or values[values.argmax()] > 1:
        raise PlanError(f"{name} must be {numbered(size, 'byte')} of 0 or 1")
    return values.astype(np.bool_)


def are_distinct(limit: int, *parts: NDArray[np.integer]) -> bool:
    """Whether no value occurs twice in the parts together. Requires values 0..limit."""
    occurs = np.zeros(limit + 1, np.bool_)
    for part in parts:
        occurs[part] = True
    return np.count_nonzero(occurs) == sum([part.size for part in parts])


def split(values: NDArray[Number], counts: Int32Array) -> Sequence[NDArray[Number]]:
    """`values` cut into one part per count."""
    return np.split(values, np.cumsum(counts)[:-1]) if counts.size else ()
