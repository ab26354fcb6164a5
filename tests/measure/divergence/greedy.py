"""The greedy text of bfloat16 compared with that of float32: how long they are equal, and how near the tie was then.

At the first difference both have read the same tokens, so the gap between the logprobs that float32 gives to its own
token and to the other one is the gap of their logits. Owns the comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_client.wire.request import GenerateOptions
from tests.measure.divergence.compare import Answer, first_difference
from tests.measure.divergence.rounds import Requests, Service, WorkerKind, together
from tests.measure.harness import percentiles
from tests.rigs.processes import Rig

GREEDY: GenerateOptions = {"temperature": 0.0, "logprobs": 20}
# Output positions, from 1.
POSITIONS = (1, 4, 16, 64)
_PERCENTILES = (10, 50, 90, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyError:
    """Greedy texts of one model in bfloat16 and in float32."""

    model: str
    streams: int
    # By output position p: the share of streams with equal first p tokens.
    equal_until: dict[int, float]
    # Equal tokens before the first difference, of all tokens up to it, the differing one included.
    equal_tokens: int
    compared_tokens: int
    # Gaps of logits in float32: where the texts first differ, and of its best two tokens at every compared position.
    gaps_at_first_difference: dict[str, float]
    gaps_of_best_two: dict[str, float]
    # Differences with a token that is not among float32's best ones.
    farther_than_best_20: int
    # The largest difference of a logprob of the same token after the same text.
    max_logprob_difference: float


def greedy_error(model: str, exact: Sequence[Answer], rounded: Sequence[Answer]) -> GreedyError:
    """Compares the streams of float32 (`exact`) with those of bfloat16. Raises ValueError without streams."""
    pairs = list(zip(exact, rounded, strict=True))
    if not pairs:
        raise ValueError("there are no streams to compare")
    gaps, usual, far, largest = list[float](), list[float](), 0, 0.0
    places = [first_difference(one.tokens, other.tokens) for one, other in pairs]
    ends = [len(one.tokens) if place is None else place for one, place in zip(exact, places, strict=True)]
    for (one, other), place, end in zip(pairs, places, ends, strict=True):
        for a, b in zip(one.logprobs[:end], other.logprobs[:end], strict=True):
            largest = max(largest, abs(a.logprob - b.logprob))
        for each in one.logprobs[: end + (place is not None)]:
            best = sorted((value for _, value in each.top), reverse=True)
            usual.append(best[0] - best[1])
        if place is not None:
            chosen = dict(one.logprobs[place].top).get(other.tokens[place])
            if chosen is None:
                far += 1
            else:
                gaps.append(one.logprobs[place].logprob - chosen)
    longest = max(len(one.tokens) for one in exact)
    return GreedyError(
        model=model,
        streams=len(pairs),
        equal_until={p: sum(end >= p for end in ends) / len(ends) for p in POSITIONS if p <= longest},
        equal_tokens=sum(ends),
        compared_tokens=sum(ends) + sum(place is not None for place in places),
        gaps_at_first_difference=percentiles(gaps, _PERCENTILES),
        gaps_of_best_two=percentiles(usual, _PERCENTILES),
        farther_than_best_20=far,
        max_logprob_difference=largest,
    )


def measure_greedy(model: Path, texts: tuple[str, ...], new_tokens: int, *, device: str, kernel: str) -> GreedyError:
    """Runs the requests with a worker of each dtype."""
    requests = Requests(texts=texts, new_tokens=new_tokens, options=GREEDY)
    found: list[list[Answer]] = []
    for dtype in ("float32", "bfloat16"):
        with Rig() as rig:
            client = Service(rig, WorkerKind(model=model, device=device, dtype=dtype, kernel=kernel)).client
            found.append(together(client, requests, lambda _: None))
            client.close()
    return greedy_error(model.name, *found)
