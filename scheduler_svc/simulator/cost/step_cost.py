"""The interface of a cost model: the shape of a step, and the questions that a model answers.

Owns the two definitions. `roofline.py` and `fitted.py` are the cost models.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class StepShape:
    """One step's work.

    `chunk_starts`, `chunk_counts` int64[c]: first position and tokens of each prompt chunk. `contexts` int64[d]:
    positions that each decode row attends to, its own included. `computed_tokens`: positions that the linear layers
    compute, padding included. `samples`: positions that need logits.
    """

    chunk_starts: IntArray
    chunk_counts: IntArray
    contexts: IntArray
    computed_tokens: int
    samples: int
    pages_copied: int = 0
    host_pages_moved: int = 0


class CostModel(Protocol):
    """Predicts how long a step takes."""

    @property
    def name(self) -> str:
        """The model in one line."""
        ...

    def seconds(self, step: StepShape) -> float:
        """Returns the device's time from the step's start to its result."""
        ...

    def page_copy_us(self) -> float:
        """Returns the time to copy one page to or from host memory."""
        ...

    def token_us(self) -> float:
        """Returns the time to compute one token of a long prompt."""
        ...
