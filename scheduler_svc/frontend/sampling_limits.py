"""The numbers in SamplingParams: the value that turns each one off, and what a request may set.

Owns no checks: `sampling.py` checks requests with this table, and `model.py` fills in what a model has no default for.
top_k and num_samples are missing here because their limits depend on the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Limits:
    """`off` changes nothing. Values are `low` to `high`, or above `low` if `above_low`; `low` is then 0."""

    off: float
    low: float
    high: float
    above_low: bool = False


# By their names in SamplingParams.
LIMITS: Mapping[str, Limits] = {
    "temperature": Limits(1, 0, 100),
    "top_p": Limits(1, 0, 1),
    "min_p": Limits(0, 0, 1),
    "typical_p": Limits(1, 0, 1, above_low=True),
    "presence_penalty": Limits(0, -2, 2),
    "frequency_penalty": Limits(0, -2, 2),
    # The lowest float32 that reads as 0.01.
    "repetition_penalty": Limits(1, float(np.float32(0.01)), 100),
}
