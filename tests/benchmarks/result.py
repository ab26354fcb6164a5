"""What one engine did with a workload, and the figures made of it.

Owns the definitions: times count from the moment all requests were handed over, for every engine alike. Knows nothing
of how an engine works.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.percentiles import percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One run."""

    engine: str
    # What a reader must know of how it was run.
    note: str
    # From handing over the requests to the last token.
    seconds: float
    # Per request, in the workload's order.
    tokens: list[list[int]]
    # Seconds at which each of them was there.
    times: list[list[float]]
    # Per process, 10^6 bytes.
    peak_mb: dict[str, float]
    # CPU seconds during the run of the process that computes.
    engine_cpu_seconds: float
    # CPU seconds during the run of all processes but the one that computes; empty where there is only that.
    outside_cpu_seconds: dict[str, float] = field(default_factory=dict[str, float])
    # Whatever else is worth knowing.
    details: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def figures(self) -> dict[str, Any]:
        """As they are printed: tokens/s, milliseconds, microseconds per token, megabytes."""
        first_ms = [1e3 * times[0] for times in self.times if times]
        gaps_ms = [1e3 * (b - a) for times in self.times for a, b in itertools.pairwise(times)]
        outside_us = {name: 1e6 * seconds / self.num_tokens for name, seconds in self.outside_cpu_seconds.items()}
        return {
            "engine": self.engine,
            "note": self.note,
            "output_tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.num_tokens / self.seconds,
            # Steadier than the clock where the machine does other things too.
            "tokens_per_engine_cpu_second": self.num_tokens / self.engine_cpu_seconds,
            "ttft_ms": percentiles(first_ms),
            "itl_ms": percentiles(gaps_ms),
            "outside_cpu_us_per_token": outside_us,
            "peak_mb": self.peak_mb,
            "details": self.details,
        }


def different_tokens(results: list[EngineResult]) -> list[str]:
    """One line for each request whose tokens are not those of the first result."""
    lines: list[str] = []
    for other in results[1:]:
        who = f"{results[0].engine} and {other.engine}"
        for i, (ours, theirs) in enumerate(zip(results[0].tokens, other.tokens, strict=True)):
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                at = next((k for k, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
                lines.append(f"request {i}: {who} differ from token {at} of {len(ours)}")
    return lines
