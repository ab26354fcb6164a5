"""Arrivals drawn at random: their times, lengths, prefixes and tenants.

Owns the draws. Each quantity has its own generator, so changing one option leaves the others' draws as they were: the
same seed at another rate yields the same requests at other times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.simulator.workload.lengths import Lengths
from scheduler_svc.simulator.workload.request_source import Arrival, WorkloadError
from scheduler_svc.simulator.workload.tokens import OWN_SPACE, PREFIX_SPACE, tokens_of

# Requests drawn at once.
_BATCH = 4096
# The tokens of all shared prefixes, which stay in memory.
_MAX_PREFIX_TOKENS = 1 << 26


class Spacing(StrEnum):
    """The distribution of the gaps between arrivals."""

    POISSON = "poisson"
    BURSTY = "bursty"
    UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """`own_rate` requests per second. A prompt is one of `prefix_groups` prefixes, followed by its own tokens.

    `burstiness` is the standard deviation of BURSTY gaps divided by their mean. Tenant 0 sends `greedy_share` of all
    requests, or an equal share if that is 0.
    """

    num_requests: int
    own_rate: float
    inputs: Lengths
    outputs: Lengths
    spacing: Spacing = Spacing.POISSON
    burstiness: float = 3.0
    prefix_groups: int = 0
    prefix_tokens: int = 0
    num_tenants: int = 1
    greedy_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefix_groups * self.prefix_tokens > _MAX_PREFIX_TOKENS:
            raise WorkloadError(
                f"{self.prefix_groups} prefixes of {self.prefix_tokens} tokens exceed {_MAX_PREFIX_TOKENS} tokens"
            )

    @property
    def name(self) -> str:
        """The lengths, the shared prefixes and the tenants."""
        shared = f", {self.prefix_groups} prefixes of {self.prefix_tokens}" if self.prefix_groups else ""
        tenants = f", {self.num_tenants} tenants" if self.num_tenants > 1 else ""
        return f"{self.num_requests:,} requests of {self.inputs.text} in, {self.outputs.text} out{shared}{tenants}"

    def arrivals(self, rate: float, vocab_size: int) -> Iterator[Arrival]:
        """Yields the arrivals, drawing a batch at a time."""
        rngs = [np.random.default_rng([self.seed, stream]) for stream in range(5)]
        prefixes = self._prefixes(vocab_size)
        at = 0.0
        for first in range(0, self.num_requests, _BATCH):
            count = min(_BATCH, self.num_requests - first)
            moments = at + np.cumsum(self._gaps(rngs[0], count)) / rate
            at = float(moments[-1])
            inputs, outputs = self.inputs.draw(rngs[1], count), self.outputs.draw(rngs[2], count)
            groups = rngs[3].integers(0, max(1, len(prefixes)), count)
            tenants = self._tenants(rngs[4], count)
            for i in range(count):
                key = np.array([OWN_SPACE | first + i])
                own = tokens_of(key, int(inputs[i]), vocab_size)
                prompt = np.concatenate([prefixes[int(groups[i])], own]) if prefixes else own
                yield Arrival(
                    at=float(moments[i]), prompt=prompt, output_tokens=int(outputs[i]), tenant=int(tenants[i])
                )

    def _prefixes(self, vocab_size: int) -> list[Int32Array]:
        keys = [np.array([PREFIX_SPACE | group]) for group in range(self.prefix_groups)]
        return [tokens_of(key, self.prefix_tokens, vocab_size) for key in keys] if self.prefix_tokens else []

    def _gaps(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        """Returns gaps of mean 1."""
        match self.spacing:
            case Spacing.UNIFORM:
                return np.ones(count)
            case Spacing.BURSTY:
                variance = self.burstiness**2
                return rng.gamma(1 / variance, variance, count)
            case Spacing.POISSON:
                return rng.exponential(1.0, count)

    def _tenants(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        if self.num_tenants == 1:
            return np.zeros(count, np.int64)
        if not self.greedy_share:
            return rng.integers(0, self.num_tenants, count)
        others = rng.integers(1, self.num_tenants, count)
        return np.where(rng.random(count) < self.greedy_share, 0, others)
