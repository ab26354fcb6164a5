"""The requests that arrive: their tokens, lengths and times, drawn at random, and which of several cells each goes to.

A workload yields its arrivals one at a time, so a million requests need no more memory than the live ones.

**Tokens.** The same key always gives the same tokens: splitmix64 of (key, position), modulo the vocabulary. No prompt
contains the last token id, which is the simulated EOS.

**Draws.** Each quantity has its own generator, so changing one option leaves the others' draws as they were: the same
seed at another rate yields the same requests at other times.

**Cells** are chosen by the beginning of a prompt, at random, or by load. The choice by the beginning is a model of
Envoy's with `deploy/envoy.yaml`: a hash of the beginning orders the cells, and one with more than 1.25 times its share
of the live requests is passed over.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array
from tandem_contract.plural import counted, numbered
from tandem_contract.row_checksum import mix

# Key spaces. They keep the blocks of a trace apart from tokens that belong to one prompt alone.
OWN_SPACE, BLOCK_SPACE, PREFIX_SPACE = 1 << 56, 2 << 56, 3 << 56


def eos_of(vocab_size: int) -> int:
    """Returns the token that ends a sequence. No prompt contains it."""
    return vocab_size - 1


def tokens_of(keys: npt.NDArray[np.int64], length: int, vocab_size: int) -> Int32Array:
    """Returns int32[len(keys) * length]: `length` tokens per key, one key after another."""
    first = mix(keys.astype(np.uint64))
    numbers = mix(first[:, None] + np.arange(length, dtype=np.uint64)[None, :])
    return (numbers % np.uint64(vocab_size - 1)).astype(np.int32).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """One request: seconds since the clock's start, prompt int32[n], the tokens that it will get, its tenant."""

    at: float
    prompt: Int32Array
    output_tokens: int
    tenant: int = 0


MAX_TOKENS = 10_000_000
GRAMMAR = "N, uniform:LEAST:MOST, exponential:MEAN[:MOST] or lognormal:MEAN:SIGMA[:MOST]"
# The least and most numbers that each kind takes.
_ARITY = {"fixed": (1, 1), "uniform": (2, 2), "exponential": (1, 2), "lognormal": (2, 3)}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 on. `text` is the source that it was parsed from."""

    text: str
    kind: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return self.text

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Returns int64[count]."""
        numbers, most = self.numbers, float(MAX_TOKENS)
        match self.kind:
            case "fixed":
                values = np.full(count, numbers[0])
            case "uniform":
                values = rng.integers(int(numbers[0]), int(numbers[1]), count, endpoint=True).astype(np.float64)
            case "exponential":
                values, most = rng.exponential(numbers[0], count), (*numbers, most)[1]
            case _:
                mean, sigma = numbers[:2]
                # The flag gives the mean of the lengths, not that of their logarithms.
                values, most = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count), (*numbers, most)[2]
        return np.clip(np.rint(values), 1, most).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """Returns the distribution. Raises ValueError with what is wrong, to be read behind the flag and its value."""
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    least, most = _ARITY.get(kind, (0, -1))
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        # Every kind takes at least one number.
        numbers = []
    if not least <= len(numbers) <= most:
        raise ValueError(f"it must be {GRAMMAR}")
    for i, number in enumerate(numbers):
        is_sigma = kind == "lognormal" and i == 1
        low, high = (0.0, 10.0) if is_sigma else (1.0, float(MAX_TOKENS))
        if not low <= number <= high:
            raise ValueError(f"the value {number:g} must be from {low:g} to {high:g}")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise ValueError(f"the value {numbers[0]:g} must be at most {numbers[1]:g}")
    return Lengths(text, kind, tuple(numbers))


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
        if (total := self.prefix_groups * self.prefix_tokens) > _MAX_PREFIX_TOKENS:
            raise ValueError(f"the prefixes have {total} tokens; the limit is {_MAX_PREFIX_TOKENS}")

    @property
    def name(self) -> str:
        """The lengths, the shared prefixes and the tenants."""
        shared = f", {numbered(self.prefix_groups, 'prefix')} of {self.prefix_tokens}" if self.prefix_groups else ""
        tenants = f", {self.num_tenants} tenants" if self.num_tenants > 1 else ""
        return (
            f"{counted(self.num_requests, 'request')} of {self.inputs.text} in, "
            f"{self.outputs.text} out{shared}{tenants}"
        )

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
                rest = tokens_of(key, int(inputs[i]), vocab_size)
                prompt = np.concatenate([prefixes[int(groups[i])], rest]) if prefixes else rest
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


_FIRST_TOKENS = 256
LOAD_FACTOR = 1.25


class Spread(StrEnum):
    """How requests are spread over cells."""

    HASH = "hash"
    RANDOM = "random"
    LEAST = "least"


class Router:
    """Chooses cells of equal size."""

    def __init__(self, spread: Spread, num_cells: int, seed: int) -> None:
        self._spread, self._num_cells = spread, num_cells
        self._rng = random.Random(seed)

    def choose(self, prompt: Int32Array, tenant: int, live: Sequence[int]) -> int:
        """The number of the cell. `live`: the requests that each has and has not ended."""
        if self._num_cells == 1:
            return 0
        if self._spread is Spread.RANDOM:
            return self._rng.randrange(self._num_cells)
        least = min(range(self._num_cells), key=live.__getitem__)
        if self._spread is Spread.LEAST:
            return least
        slots = math.ceil(math.ceil(LOAD_FACTOR * (sum(live) + 1)) / self._num_cells)
        return next((number for number in self._order(prompt, tenant) if live[number] <= slots), least)

    def _order(self, prompt: Int32Array, tenant: int) -> list[int]:
        beginning = hashlib.blake2b(prompt[:_FIRST_TOKENS].tobytes() + tenant.to_bytes(8, "little"), digest_size=8)

        def weight(number: int) -> bytes:
            return hashlib.blake2b(beginning.digest() + number.to_bytes(8, "little"), digest_size=8).digest()

        return sorted(range(self._num_cells), key=weight)
