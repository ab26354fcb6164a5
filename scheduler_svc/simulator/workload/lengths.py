"""Distributions of lengths, as a flag names them.

Owns their grammar: `512`, `uniform:64:1024`, `exponential:MEAN[:MOST]`, `lognormal:MEAN:SIGMA[:MOST]`.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_TOKENS = 10_000_000
GRAMMAR = "N, uniform:LEAST:MOST, exponential:MEAN[:MOST] or lognormal:MEAN:SIGMA[:MOST]"
# Kind and how many numbers it takes.
_ARITY = {"fixed": (1, 1), "uniform": (2, 2), "exponential": (1, 2), "lognormal": (2, 3)}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers of tokens, at least 1. `text` is what it was read from."""

    text: str
    kind: str
    numbers: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """int64[count]."""
        numbers, most = self.numbers, float(MOST_TOKENS)
        match self.kind:
            case "fixed":
                values = np.full(count, numbers[0])
            case "uniform":
                values = rng.integers(int(numbers[0]), int(numbers[1]), count, endpoint=True).astype(np.float64)
            case "exponential":
                values, most = rng.exponential(numbers[0], count), (*numbers, most)[1]
            case _:
                mean, sigma = numbers[:2]
                # Of the mean of the lengths themselves, not of their logarithms.
                values, most = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count), (*numbers, most)[2]
        return np.clip(np.rint(values), 1, most).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """Raises ValueError with the grammar."""
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    least, most = _ARITY.get(kind, (0, -1))
    numbers: list[float] = []
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        least = most + 1
    if not least <= len(numbers) <= most:
        raise ValueError(f"{text!r} is no distribution of lengths; write {GRAMMAR}")
    is_sigma = [kind == "lognormal" and i == 1 for i in range(len(numbers))]
    for number, sigma in zip(numbers, is_sigma, strict=True):
        low, high = (0.0, 10.0) if sigma else (1.0, float(MOST_TOKENS))
        if not low <= number <= high:
            raise ValueError(f"{text!r}: {number:g} is outside {low:g} to {high:g}")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise ValueError(f"{text!r}: {numbers[0]:g} is more than {numbers[1]:g}")
    return Lengths(text, kind, tuple(numbers))
