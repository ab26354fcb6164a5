"""Random delays before a checking worker applies a plan and before it answers. Owns a seeded generator; no clock."""

import random

# Seconds with these weights: usually none, sometimes beyond the next plan's arrival.
_DELAYS = (0.0, 0.0005, 0.002, 0.006)
_WEIGHTS = (60, 20, 15, 5)


class Lateness:
    """Delays before applying a plan and before answering it; all zero without a seed."""

    def __init__(self, *, seed: int | None, step_seconds: float) -> None:
        self._rng = None if seed is None else random.Random(seed)
        self._step_seconds = step_seconds

    def before_apply(self) -> float:
        """Returns the step's own time plus a random delay, in seconds."""
        return self._step_seconds + self._draw()

    def before_answer(self) -> float:
        return self._draw()

    def _draw(self) -> float:
        return 0.0 if self._rng is None else self._rng.choices(_DELAYS, _WEIGHTS)[0]
