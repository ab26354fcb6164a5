"""What a step is made of, as far as its duration depends on it, and what a cost model must answer.

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
    compute, padding included. `samples`: positions whose logits are wanted.
    """

    chunk_starts: IntArray
    chunk_counts: IntArray
    contexts: IntArray
    computed_tokens: int
    samples: int
    pages_copied: int = 0
    host_pages_moved: int = 0


class CostModel(Protocol):
    """How long a step takes."""

    @property
    def name(self) -> str:
        """One line for people."""
        ...

    def seconds(self, step: StepShape) -> float:
        """Of the device, from the step's start to its result."""
        ...

    def page_copy_us(self) -> float:
        """To move one page to or from host memory."""
        ...

    def token_us(self) -> float:
        """To compute one token of a long prompt."""
        ...
