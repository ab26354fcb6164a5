"""What every frame of the internal protocols shares: parsing, and arrays as raw little-endian bytes.

Owns nothing. Hostile bytes raise WireError and nothing else.
"""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T", bound=np.generic)


class WireError(ValueError):
    """A frame that does not keep to its protocol; the text says how."""


def parsed(kind: type[_M], frame: bytes) -> _M:
    """The frame as a message. Raises WireError."""
    message = kind()
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise WireError(f"not a {kind.DESCRIPTOR.name}: {error}") from None
    return message


def array(data: bytes, dtype: type[_T], name: str) -> npt.NDArray[_T]:
    """A read-only array over the bytes. Raises WireError where they are no whole number of elements."""
    little = np.dtype(dtype).newbyteorder("<")
    if len(data) % little.itemsize:
        raise WireError(f"{name} has {len(data)} bytes, no multiple of {little.itemsize}")
    return np.frombuffer(data, little)


def packed(values: npt.NDArray[Any]) -> bytes:
    """The array's elements, little-endian."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
