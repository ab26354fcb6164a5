"""When a checking worker applies a plan and when it lets the result go. Owns a seeded generator, reads no clock."""

import random

# Seconds, drawn with these weights: mostly prompt, at times later than the next plan's arrival.
_DELAYS = (0.0, 0.0005, 0.002, 0.006)
_WEIGHTS = (60, 20, 15, 5)


class Lateness:
    """Delays before applying a plan and between applying it and answering; zero without a seed."""

    def __init__(self, *, seed: int | None, step_seconds: float) -> None:
        self._rng = None if seed is None else random.Random(seed)
        self._step_seconds = step_seconds

    def before_apply(self) -> float:
        """The step's own time, and perhaps more."""
        return self._step_seconds + self._draw()

    def before_answer(self) -> float:
        return self._draw()

    def _draw(self) -> float:
        return 0.0 if self._rng is None else self._rng.choices(_DELAYS, _WEIGHTS)[0]
