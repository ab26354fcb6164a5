"""Generating with a KV cache and without one, in exact arithmetic. Owns what a forward costs; measures nothing.

A forward over `new` tokens behind `past` cached ones multiplies every new token by the layers' weights (2 FLOPs per
element), every query by each key it sees and every weight by its value (4 FLOPs per element of head and layer), and
the last token by the logits' weights. Norms, activations and rotary embeddings are left out. Bytes: the weights once
per forward; K/V of each new token written once; every K/V that the forward sees read once.

Without a cache a forward's K/V live as long as the forward; they are written and read all the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.workload import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one forward, or of several."""

    flops: int
    weight_bytes: int
    kv_bytes: int

    @property
    def bytes(self) -> int:
        """Read and written, activations left out."""
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            flops=self.flops + other.flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
        )


NOTHING = Cost(flops=0, weight_bytes=0, kv_bytes=0)


def attended(past: int, length: int, window: int | None) -> int:
    """Keys seen by the queries at positions past … length − 1, together: each sees itself and what the window shows."""
    if window is None or length <= window:
        return (length * (length + 1) - past * (past + 1)) // 2
    if past >= window:
        return (length - past) * window
    return attended(past, window, None) + (length - window) * window


def forward(geometry: Geometry, past: int, new: int, window: int | None = None) -> Cost:
    """One forward that ends in one row of logits."""
    length = past + new
    model = geometry.model
    score_flops = 4 * model.layers * model.heads * model.head_dim
    seen = length if window is None else min(length, new + window - 1)
    return Cost(
        flops=2 * model.layer_parameters * new
        + score_flops * attended(past, length, window)
        + 2 * model.head_parameters,
        weight_bytes=(model.layer_parameters + model.head_parameters) * geometry.element_bytes,
        kv_bytes=(new + seen) * geometry.token_bytes,
    )


def next_token(geometry: Geometry, context: int, *, cached: bool, window: int | None = None) -> Cost:
    """The forward that makes the token behind `context` tokens: of the last of them, or of them all."""
    past = context - 1 if cached else 0
    return forward(geometry, past, context - past, window)


def generate(geometry: Geometry, prompt: int, length: int, *, cached: bool, window: int | None = None) -> Cost:
    """A sequence of `length` tokens from a prompt: length − prompt forwards, the first over all of the prompt."""
    total = forward(geometry, 0, prompt, window) if length > prompt else NOTHING
    for context in range(prompt + 1, length):
        total += next_token(geometry, context, cached=cached, window=window)
    return total


def read_tokens(sequences: Iterable[Sequence], window: int | None) -> int:
    """Tokens whose K/V attention reads while these sequences generate, each once per token generated."""
    return sum(attended(sequence.prompt, sequence.length, window) for sequence in sequences)
