"""The result of one engine on a workload, and the figures computed from it.

Owns the definitions: for every engine, times count from the moment all requests were submitted. Does not know how an
engine works.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.percentiles import percentiles


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
        first_ms = [1e3 * times[0] for times in self.times if times]
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


def different_tokens(results: list[EngineResult]) -> list[str]:
    """Returns a line for each request with tokens that differ from those of the first result."""
    lines: list[str] = []
    for other in results[1:]:
        engines = f"{results[0].engine} and {other.engine}"
        for i, (ours, theirs) in enumerate(zip(results[0].tokens, other.tokens, strict=True)):
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                at = next((k for k, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
                lines.append(f"request {i}: {engines} differ from token {at} of {len(ours)}")
    return lines
