"""The search for the highest rate that meets a goal: a bisection over requests per second.

Owns the search, and the rule for whether a probe meets the goal. A probe can be any function of a rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

LATE_SHARE = 0.01
"""The share of requests that may miss the goal, because the goal is a p99."""
_MIN_RATE, _MAX_RATE = 1e-6, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One simulation at one rate.

    `missed` counts requests that got their first token too late or never. `is_whole` is False if the simulation was
    stopped because more requests had missed than may.
    """

    rate: float
    requests: int
    missed: int
    ttft_p99: float
    is_whole: bool

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return self.is_whole and self.missed <= LATE_SHARE * self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRange:
    """`highest_holding` is 0 if no rate held, `lowest_failing` is inf if none failed."""

    highest_holding: float
    lowest_failing: float


def find_rate(
    probe: Callable[[float], Probe], *, start: float, max_probes: int, precision: float
) -> tuple[RateRange, list[Probe]]:
    """Doubles or halves from `start` until one rate holds and one fails, then halves the gap on a log scale."""
    holding, failing = 0.0, math.inf
    probes: list[Probe] = []
    rate = start
    while len(probes) < max_probes and _MIN_RATE <= rate <= _MAX_RATE and failing > holding * (1 + precision):
        probes.append(probe(rate))
        if probes[-1].holds:
            holding = rate
        else:
            failing = rate
        rate = holding * 2 if failing == math.inf else failing / 2 if holding == 0.0 else math.sqrt(holding * failing)
    return RateRange(highest_holding=holding, lowest_failing=failing), probes
