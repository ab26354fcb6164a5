"""Two rounds of the same requests compared: where texts diverge, and the difference of logprobs before that."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_client.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of one stream."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    preemptions: int = 0
    worker_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One round compared with the round alone."""

    name: str
    streams: int
    diverged: int
    # Output tokens, the tokens from the first difference on, and the first such position in any stream.
    tokens: int
    tokens_beyond: int
    earliest: int | None
    # The largest difference between logprobs of the same token, or the same alternative, after the same text.
    max_logprob_difference: float
    max_prompt_logprob_difference: float
    # Streams that were preempted, and streams that met the worker's death.
    preempted: int
    interrupted: int


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first position where the sequences differ, or None if they are equal."""
    if tuple(one) == tuple(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def logprob_difference(one: Sequence[TokenLogprob], other: Sequence[TokenLogprob]) -> float:
    """Returns the largest difference over tokens and over alternatives in both; 0 if there is nothing to compare."""
    largest = 0.0
    for a, b in zip(one, other, strict=False):
        others = dict(b.top)
        pairs = [(a.logprob, b.logprob), *((value, others[token]) for token, value in a.top if token in others)]
        largest = max(largest, *(abs(x - y) for x, y in pairs))
    return largest


def compare(name: str, alone: Sequence[Answer], answers: Sequence[Answer]) -> Difference:
    pairs = list(zip(alone, answers, strict=True))
    places = [first_difference(one.tokens, other.tokens) for one, other in pairs]
    same = [
        logprob_difference(one.logprobs[:place], other.logprobs[:place])
        for (one, other), place in zip(pairs, places, strict=True)
    ]
    return Difference(
        name=name,
        streams=len(pairs),
        diverged=sum(place is not None for place in places),
        tokens=sum(len(other.tokens) for _, other in pairs),
        tokens_beyond=sum(
            len(other.tokens) - place for (_, other), place in zip(pairs, places, strict=True) if place is not None
        ),
        earliest=min((place for place in places if place is not None), default=None),
        max_logprob_difference=max(same, default=0.0),
        max_prompt_logprob_difference=max(
            (logprob_difference(one.prompt_logprobs, other.prompt_logprobs) for one, other in pairs), default=0.0
        ),
        preempted=sum(other.preemptions > 0 for _, other in pairs),
        interrupted=sum(other.worker_changes > 0 for _, other in pairs),
    )
