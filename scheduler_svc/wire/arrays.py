"""Parses frames of the internal protocols, reads their fields, and converts arrays to and from little-endian bytes.

Owns no state. Hostile bytes raise WireError and nothing else.
"""

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from tandem_contract.plural import numbered

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T", bound=np.generic)


class WireError(ValueError):
    """A frame that breaks its protocol; the message says how."""


def parsed(kind: type[_M], frame: bytes) -> _M:
    """Parses the frame. Raises WireError if it is malformed."""
    message = kind()
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise WireError(f"the message is not a {kind.DESCRIPTOR.name}: {error}") from None
    return message


def fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of these names, of a message or of a dataclass."""
    return {name: getattr(source, name) for name in names}


def array(data: bytes, dtype: type[_T], name: str) -> npt.NDArray[_T]:
    """Returns a read-only array over the bytes. Raises WireError if they are not a multiple of the element size."""
    little = _little_endian(dtype)
    if len(data) % little.itemsize:
        raise WireError(f"{name} has {numbered(len(data), 'byte')}, which is not a multiple of {little.itemsize}")
    return np.frombuffer(data, little)


@cache
def _little_endian(dtype: type[np.generic]) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def packed(values: npt.NDArray[Any]) -> bytes:
    """Returns the array's elements as little-endian bytes."""
    if sys.byteorder == "big":
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return values.tobytes()
