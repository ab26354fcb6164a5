"""Who comes, with which tokens. Owns the drawing of lengths, prompts and first arrivals; knows nothing of memory.

The same settings give the same workload, whatever the layout.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.kv_lab.settings import Settings

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """`tokens` int32[length] holds the prompt and what is generated after it."""

    index: int
    request: int
    """Sequences of one request share their prompt."""
    prompt: int
    tokens: Int32Array

    @property
    def length(self) -> int:
        """Tokens when it ends."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Places in which one request follows another: `places[i]` arrives first at step `arrivals[i]`."""

    places: tuple[tuple[tuple[Sequence, ...], ...], ...]
    arrivals: tuple[int, ...]

    def in_order(self) -> list[Sequence]:
        """Every sequence, first lives first."""
        lives = zip(*self.places, strict=True)
        return [sequence for life in lives for request in life for sequence in request]


def draw(settings: Settings) -> Workload:
    """The workload of these settings."""
    rng = np.random.default_rng(settings.seed)
    prefixes = rng.integers(0, VOCABULARY, (settings.prefix_groups, settings.prefix_length), np.int32)
    num_places = settings.sequences // settings.samples
    gaps = rng.exponential(settings.gap, num_places) if settings.gap else np.zeros(num_places)
    # The first arrives at step 0.
    arrivals = tuple(int(step) for step in np.cumsum(gaps) - gaps[0])
    places: list[list[tuple[Sequence, ...]]] = [[] for _ in range(num_places)]
    request = 0
    # Life by life, so that more lives add to a workload and do not change it.
    for _ in range(settings.lives):
        for place in places:
            prefix = prefixes[int(rng.integers(settings.prefix_groups))] if settings.prefix_groups else None
            place.append(_request(settings, rng, request, prefix))
            request += 1
    return Workload(places=tuple(tuple(place) for place in places), arrivals=arrivals)


def _request(
    settings: Settings, rng: np.random.Generator, request: int, prefix: Int32Array | None
) -> tuple[Sequence, ...]:
    first = int(rng.integers(settings.min_length, settings.max_length, endpoint=True))
    # At least one token of the prompt and one that is generated.
    prompt_length = min(max(1, round(first * settings.prompt_share)), first - 1)
    prompt = rng.integers(0, VOCABULARY, prompt_length, np.int32)
    if prefix is not None:
        shared = min(len(prefix), prompt_length)
        prompt[:shared] = prefix[:shared]
    least = max(settings.min_length, prompt_length + 1)
    sequences: list[Sequence] = []
    for sample in range(settings.samples):
        length = first if sample == 0 else int(rng.integers(least, settings.max_length, endpoint=True))
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
