"""The sequences that arrive and their tokens. Owns the draws of lengths, prompts and first arrivals.

The workload depends on the settings alone, so every layout gets the same one.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.simulator.memory.settings import Settings

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """`tokens` int32[length] holds the prompt and the tokens that are generated after it."""

    index: int
    request: int
    """The request's number. Sequences of one request share their prompt."""
    prompt: int
    tokens: Int32Array

    @property
    def length(self) -> int:
        """Tokens at the sequence's end."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of each client, one after another. Client i sends its first at step `arrivals[i]`."""

    clients: tuple[tuple[tuple[Sequence, ...], ...], ...]
    arrivals: tuple[int, ...]

    def in_order(self) -> list[Sequence]:
        """Returns every sequence: those of all first requests, then those of all second requests, and so on."""
        rounds = zip(*self.clients, strict=True)
        return [sequence for requests in rounds for request in requests for sequence in request]


def draw(settings: Settings) -> Workload:
    """Draws the workload of these settings."""
    rng = np.random.default_rng(settings.seed)
    prefixes = rng.integers(0, VOCABULARY, (settings.prefix_groups, settings.prefix_length), np.int32)
    num_clients = settings.sequences // settings.samples
    gaps = rng.exponential(settings.gap, num_clients) if settings.gap else np.zeros(num_clients)
    # The first client starts at step 0.
    arrivals = tuple(int(step) for step in np.cumsum(gaps) - gaps[0])
    clients: list[list[tuple[Sequence, ...]]] = [[] for _ in range(num_clients)]
    number = 0
    # Round by round, so that more rounds add requests and leave the first ones as they were.
    for _ in range(settings.lives):
        for client in clients:
            prefix = prefixes[int(rng.integers(settings.prefix_groups))] if settings.prefix_groups else None
            client.append(_request(settings, rng, number, prefix))
            number += 1
    return Workload(clients=tuple(tuple(client) for client in clients), arrivals=arrivals)


def _request(
    settings: Settings, rng: np.random.Generator, request: int, prefix: Int32Array | None
) -> tuple[Sequence, ...]:
    first = int(rng.integers(settings.min_length, settings.max_length, endpoint=True))
    # At least one token is prompt and one is generated.
    prompt_length = min(max(1, round(first * settings.prompt_share)), first - 1)
    prompt = rng.integers(0, VOCABULARY, prompt_length, np.int32)
    if prefix is not None:
        shared = min(len(prefix), prompt_length)
        prompt[:shared] = prefix[:shared]
    shortest = max(settings.min_length, prompt_length + 1)
    sequences: list[Sequence] = []
    for sample in range(settings.samples):
        length = first if sample == 0 else int(rng.integers(shortest, settings.max_length, endpoint=True))
        generated = rng.integers(0, VOCABULARY, length - prompt_length, np.int32)
        sequences.append(
            Sequence(
                index=request * settings.samples + sample,
                request=request,
                prompt=prompt_length,
                tokens=np.concatenate((prompt, generated)),
            )
        )
    return tuple(sequences)
