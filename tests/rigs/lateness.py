"""Random delays before a checking worker applies a plan and before it answers. Owns a seeded generator; no clock."""

import random
from pathlib import Path

# Seconds with these weights: usually none, sometimes beyond the next plan's arrival.
_DELAYS = (0.0, 0.0005, 0.002, 0.006)
_WEIGHTS = (60, 20, 15, 5)
_SLOW_SECONDS = 0.2


class Lateness:
    """Delays before applying a plan and before answering it; all zero without a seed.

    While `slow_file` exists, a step takes `_SLOW_SECONDS`: a test that counts running streams is sure that none ends.
    """

    def __init__(self, *, seed: int | None, step_seconds: float, slow_file: Path | None = None) -> None:
        self._rng = None if seed is None else random.Random(seed)
        self._step_seconds = step_seconds
        self._slow_file = slow_file

    def before_apply(self) -> float:
        """Returns the step's own time plus a random delay, in seconds."""
        slow = self._slow_file is not None and self._slow_file.exists()
        return (_SLOW_SECONDS if slow else self._step_seconds) + self._draw()

    def before_answer(self) -> float:
        return self._draw()

    def _draw(self) -> float:
        return 0.0 if self._rng is None else self._rng.choices(_DELAYS, _WEIGHTS)[0]
