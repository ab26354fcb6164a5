"""The cost of generation with a KV cache and without one, in exact arithmetic. Owns the cost of a forward.

A forward over `new` tokens behind `past` cached ones multiplies every new token by the layers' weights (2 FLOPs per
element), every query by the keys it attends to and every attention weight by its value (4 FLOPs per element of head
and layer), and the last token by the output projection. Norms, activations and rotary embeddings are left out. A
forward reads the weights once, writes the K/V of each new token once and reads all K/V that it attends to once.

Without a cache the K/V of a forward last as long as the forward, which writes and reads them all the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.workload import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one forward, or of several."""

    flops: int
    weight_bytes: int
    kv_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes read and written, without activations."""
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            flops=self.flops + other.flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
        )


NOTHING = Cost(flops=0, weight_bytes=0, kv_bytes=0)


def attended(past: int, length: int, window: int | None) -> int:
    """Counts pairs of query and key for the queries at positions past … length − 1, each of which sees itself too."""
    if window is None or length <= window:
        return (length * (length + 1) - past * (past + 1)) // 2
    if past >= window:
        return (length - past) * window
    return attended(past, window, None) + (length - window) * window


def forward(geometry: Geometry, past: int, new: int, window: int | None = None) -> Cost:
    """Returns the cost of a forward that computes the logits of one position."""
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
    """Returns the cost of the token behind `context` tokens, of which a cache holds all but the last."""
    past = context - 1 if cached else 0
    return forward(geometry, past, context - past, window)


def generate(geometry: Geometry, prompt: int, length: int, *, cached: bool, window: int | None = None) -> Cost:
    """Returns the cost of the length − prompt forwards of a sequence. The first computes the whole prompt."""
    total = forward(geometry, 0, prompt, window) if length > prompt else NOTHING
    for context in range(prompt + 1, length):
        total += next_token(geometry, context, cached=cached, window=window)
    return total


def read_tokens(sequences: Iterable[Sequence], window: int | None) -> int:
    """Counts the tokens of K/V that attention reads while these sequences generate, once per generated token."""
    return sum(attended(sequence.prompt, sequence.length, window) for sequence in sequences)
