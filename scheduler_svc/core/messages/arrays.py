"""Array types of the core's messages, and empty arrays for fields without values."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

NO_IDS = np.zeros(0, np.int32)
NO_PAGES = np.zeros(0, np.int32)
NO_FLOATS = np.zeros(0, np.float32)
