"""The interface between a workload and the simulation: which requests arrive, and when.

Owns the definitions. A workload yields its arrivals one at a time, so a million requests need no more memory than the
live ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.messages.arrays import Int32Array


class WorkloadError(ValueError):
    """A workload that cannot be simulated. The message names the line of the trace or the flag."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """One request: seconds since the start, prompt int32[n], the tokens that it will get, its tenant."""

    at: float
    prompt: Int32Array
    output_tokens: int
    tenant: int = 0


class Workload(Protocol):
    """Requests in the order of their arrival."""

    @property
    def name(self) -> str:
        """A short description for the report."""
        ...

    @property
    def num_requests(self) -> int:
        """How many requests arrive in all."""
        ...

    @property
    def num_tenants(self) -> int:
        """How many tenants there are, numbered from 0."""
        ...

    @property
    def own_rate(self) -> float:
        """Mean requests per second, 0 if all arrive at once."""
        ...

    def arrivals(self, rate: float, vocab_size: int) -> Iterator[Arrival]:
        """Yields the arrivals from the first on, with all gaps scaled so that their mean rate is `rate`."""
        ...
