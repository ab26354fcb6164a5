"""Types of arrays, as annotations name them. Imports no torch."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
HostArray = NDArray[Any]
# HostArray on the host or Tensor on the device: dataclasses that are uploaded as a whole are generic in it.
Array = TypeVar("Array")
