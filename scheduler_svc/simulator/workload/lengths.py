"""Distributions of lengths in tokens, as flags write them.

Owns their grammar: `512`, `uniform:64:1024`, `exponential:MEAN[:MOST]`, `lognormal:MEAN:SIGMA[:MOST]`.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 10_000_000
GRAMMAR = "N, uniform:LEAST:MOST, exponential:MEAN[:MOST] or lognormal:MEAN:SIGMA[:MOST]"
# The least and most numbers that each kind takes.
_ARITY = {"fixed": (1, 1), "uniform": (2, 2), "exponential": (1, 2), "lognormal": (2, 3)}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 on. `text` is the source that it was parsed from."""

    text: str
    kind: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return self.text

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Returns int64[count]."""
        numbers, most = self.numbers, float(MAX_TOKENS)
        match self.kind:
            case "fixed":
                values = np.full(count, numbers[0])
            case "uniform":
                values = rng.integers(int(numbers[0]), int(numbers[1]), count, endpoint=True).astype(np.float64)
            case "exponential":
                values, most = rng.exponential(numbers[0], count), (*numbers, most)[1]
            case _:
                mean, sigma = numbers[:2]
                # The flag gives the mean of the lengths, not that of their logarithms.
                values, most = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count), (*numbers, most)[2]
        return np.clip(np.rint(values), 1, most).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """Returns the distribution. Raises ValueError with what is wrong, to be read behind the flag and its value."""
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    least, most = _ARITY.get(kind, (0, -1))
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        # Every kind takes at least one number.
        numbers = []
    if not least <= len(numbers) <= most:
        raise ValueError(f"it must be {GRAMMAR}")
    for i, number in enumerate(numbers):
        is_sigma = kind == "lognormal" and i == 1
        low, high = (0.0, 10.0) if is_sigma else (1.0, float(MAX_TOKENS))
        if not low <= number <= high:
            raise ValueError(f"the value {number:g} must be from {low:g} to {high:g}")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise ValueError(f"the value {numbers[0]:g} must be at most {numbers[1]:g}")
    return Lengths(text, kind, tuple(numbers))
