"""What arrives, and when: the interface that the simulation reads, whoever makes it.

Owns the definition. Arrivals are made one at a time, as they are wanted: a million requests need no more memory than
those that live.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.messages.arrays import Int32Array


class WorkloadError(ValueError):
    """This cannot be simulated; the message names the line of the trace or the flag."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """One request: seconds since the start, int32[n] of prompt, the tokens it will get, whose it is."""

    at: float
    prompt: Int32Array
    output_tokens: int
    tenant: int = 0


class Workload(Protocol):
    """Requests in the order of their arrival."""

    @property
    def name(self) -> str:
        """A few words for people."""
        ...

    @property
    def num_requests(self) -> int:
        """How many will come."""
        ...

    @property
    def num_tenants(self) -> int:
        """Tenants are 0 to this - 1."""
        ...

    @property
    def own_rate(self) -> float:
        """Requests per second on average; 0 where all come at once."""
        ...

    def arrivals(self, rate: float, vocab_size: int) -> Iterator[Arrival]:
        """From the first request on, faster or slower so that they come at `rate` on average."""
        ...
