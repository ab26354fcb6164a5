"""How many requests per second still meet a goal: a bisection over rates.

Owns the search and when a probe has met the goal. Knows nothing of what a probe does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

LATE_SHARE = 0.01
"""Requests that may miss the goal: what p99 says."""
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One simulation. `missed` requests got their first token too late, or none at all.

    `is_whole` False: it was stopped once more had missed than may.
    """

    rate: float
    requests: int
    missed: int
    ttft_p99: float
    is_whole: bool

    @property
    def holds(self) -> bool:
        """The goal is met."""
        return self.is_whole and self.missed <= LATE_SHARE * self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`best` is the highest rate that held, 0 where none did; `least_failing` the lowest that did not, inf if none."""

    best: float
    least_failing: float


def find_rate(
    probe: Callable[[float], Probe], *, start: float, most_probes: int, precision: float
) -> tuple[Found, list[Probe]]:
    """Doubles or halves from `start` until one rate holds and one does not, then halves the gap, on a log scale."""
    best, failing = 0.0, math.inf
    probes: list[Probe] = []
    rate = start
    while len(probes) < most_probes and _LEAST_RATE <= rate <= _MOST_RATE and failing > best * (1 + precision):
        probes.append(probe(rate))
        if probes[-1].holds:
            best = rate
        else:
            failing = rate
        rate = best * 2 if failing == math.inf else failing / 2 if best == 0.0 else math.sqrt(best * failing)
    return Found(best=best, least_failing=failing), probes
