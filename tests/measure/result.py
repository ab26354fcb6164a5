"""The result of one engine on a workload, and the figures computed from it.

Owns the definitions: for every engine, times count from the moment the first requests were submitted, and the time to
first token from the request's own submission. Does not know how an engine works.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from tests.measure.harness import percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One run of one engine."""

    engine: str
    # Conditions of the run that a reader must know.
    note: str
    # From submission of the requests to the last token.
    seconds: float
    # Per request, in the workload's order.
    tokens: list[list[int]]
    # The time in seconds of each token.
    times: list[list[float]]
    # When each request was submitted, in seconds; empty if all were at 0.
    submitted: list[float] = field(default_factory=list[float])
    # Per process, 10^6 bytes.
    peak_mb: dict[str, float]
    # CPU seconds of the computing process during the run.
    engine_cpu_seconds: float
    # CPU seconds of all other processes during the run; empty if there are none.
    outside_cpu_seconds: dict[str, float] = field(default_factory=dict[str, float])
    # Further facts about the run.
    details: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def figures(self) -> dict[str, Any]:
        """Returns tokens/s, milliseconds, microseconds per token and megabytes, as printed."""
        submitted = self.submitted or [0.0] * len(self.times)
        first_ms = [1e3 * (times[0] - at) for times, at in zip(self.times, submitted, strict=True) if times]
        gaps_ms = [1e3 * (b - a) for times in self.times for a, b in itertools.pairwise(times)]
        outside_us = {name: 1e6 * seconds / self.num_tokens for name, seconds in self.outside_cpu_seconds.items()}
        return {
            "engine": self.engine,
            "note": self.note,
            "output_tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.num_tokens / self.seconds,
            # Steadier than wall time on a busy machine.
            "tokens_per_engine_cpu_second": self.num_tokens / self.engine_cpu_seconds,
            "ttft_ms": percentiles(first_ms),
            "itl_ms": percentiles(gaps_ms),
            "outside_cpu_us_per_token": outside_us,
            "peak_mb": self.peak_mb,
            "details": self.details,
        }
